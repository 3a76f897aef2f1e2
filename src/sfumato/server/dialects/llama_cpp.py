"""llama-server's completion and infill: POST /completion, and POST /infill, which editors send
while their user types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
)

from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Finished, Prompt, Request
from sfumato.media.patches import Patches
from sfumato.options.limits import (
    LONGEST_STOP,
    MOST_BIAS,
    MOST_BIASES,
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_TOP,
)
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    LONG_PROMPT,
    ChatCall,
    Thinking,
    before,
    check_slot,
    prompts_in,
    requests_of,
)
from sfumato.server.chat.deltas import DeltaRenderer, Entry, TokenLog
from sfumato.server.chat.pictures import prompts_read
from sfumato.server.chat.sampling import seeds_of
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Answer, Dialect, Frame
from sfumato.server.schemas import First, ModelName, Objects, Only, Sampling, without_effect
from sfumato.server.service import Service
from sfumato.tasks.works import PlacedPicture

_TOP_P = "is not supported; use top_p"
_PENALTY = "penalties are not supported"
RANDOM_SEEDS = (-1, 2**32 - 1)
"""Seeds that llama-server reads as: draw one."""

Predict = Annotated[
    int | None,
    Field(ge=-1, le=MOST_TOKENS, description="Tokens at most; -1: what fits; 0: none."),
]
_Prompts = str | dict[str, Any] | Annotated[list[Any], First]
_Paths = Annotated[
    list[Annotated[str, Field(max_length=100)]], First, Field(max_length=64), AfterValidator(tuple)
]


class LoraScale(BaseModel):
    """llama-server's."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    id: int = Field(ge=0, le=2**31)
    scale: float


@without_effect(
    "n_keep n_discard n_indent samplers t_max_prompt_ms min_keep dynatemp_exponent "
    "xtc_threshold repeat_last_n dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers mirostat_tau mirostat_eta adaptive_decay backend_sampling",
    typical_p=Only(1, why=_TOP_P),
    top_n_sigma=Only(-1, 0, why=_TOP_P),
    dynatemp_range=Only(0, why="is not supported; use t_min and t_max"),
    xtc_probability=Only(0, why=_TOP_P),
    repeat_penalty=Only(1, why=_PENALTY),
    dry_multiplier=Only(0, why=_PENALTY),
    mirostat=Only(0, why="is not supported"),
    adaptive_target=Only(-1, why="is not supported"),
)
class LlamaSampling(Sampling):
    """What llama-server has on each of its routes that generate."""

    logit_bias: Annotated[Any, WithJsonSchema(schemas.LLAMA_BIAS)] = Field(
        None, description="An object or a list of pairs, of ids or texts; false bans a token."
    )
    t_max_predict_ms: int | None = Field(
        None,
        ge=-1,
        le=MOST_SECONDS,
        description="Milliseconds after which a reply that has a line break ends with what has "
        "settled; they count from the first text. 0 and -1: no limit.",
    )
    model: ModelName = None
    lora: Annotated[list[LoraScale] | None, First] = Field(
        None,
        max_length=64,
        description="The adapter that replies, by its number in /lora-adapters, at the scale 1; "
        "others at 0.",
    )
    response_fields: _Paths | None = Field(
        None,
        description='Only these fields of the answer: "content", "timings/predicted_n"; an empty '
        "list: all.",
    )

    @field_validator("lora")
    @classmethod
    def _one_adapter(cls, given: list[LoraScale] | None) -> list[LoraScale] | None:
        scales = [each.scale for each in given or () if each.scale]
        if scales not in ([], [1.0]):
            raise ValueError("one adapter at the scale 1 can reply, the others at 0")
        return given

    @property
    def adapter_number(self) -> int | None:
        return next((each.id for each in self.lora or () if each.scale), None)


class LlamaBody(LlamaSampling):
    """llama-server's own completion. What it has and we have not is refused unless neutral."""

    prompt: Annotated[_Prompts, WithJsonSchema(schemas.MIXED_PROMPTS)] = Field(
        description="Text, ids and texts in one list, or a list of prompts."
    )
    n_predict: Predict = None
    max_tokens: Predict = Field(None, description="The same as n_predict.")
    n_probs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="Most probable tokens that each token is shown with."
    )
    post_sampling_probs: bool | None = Field(
        None, description="Show probabilities in place of their logarithms."
    )
    return_tokens: bool | None = Field(None, description="Answer the reply's token ids, too.")


MOST_EXTRA = 256  # texts beside the one that is filled in


@without_effect(n_probs=Only(0, why="use /completion"))
class InfillBody(LlamaSampling):
    """llama-server's text between a prefix and a suffix."""

    input_prefix: str = Field("", description="The text before the gap.")
    input_suffix: str = Field("", description="The text after it.")
    input_extra: Annotated[
        Objects | None, Field(max_length=MOST_EXTRA), WithJsonSchema(schemas.EXTRA)
    ] = Field(None, description="Other texts: filename and text; they come first.")
    prompt: str | None = Field(None, description="Beginning of the text in the gap.")
    n_predict: Predict = None


_BIAS = "logit_bias"

BAN = -100.0


def biases_of(service: Service, value: Any) -> dict[str, float] | None:
    """OpenAI's form: token ids as texts, and numbers; of a text each of its tokens. False bans a
    token. Raises Refused."""
    if value is None:
        return None
    if not isinstance(value, dict | list):
        raise Refused(_BIAS, "must be an object, or a list of pairs")
    if len(value) > MOST_BIASES:
        raise Refused(_BIAS, f"at most {MOST_BIASES} tokens")
    biases: dict[str, float] = {}
    for key, bias in _pairs(value):
        if bias is False:
            bias = BAN
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise Refused(_BIAS, "a bias must be a number or false")
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise Refused(_BIAS, f"a bias is not from -{MOST_BIAS} to {MOST_BIAS}")
        for token in _bias_tokens(service, key):
            biases[token] = float(bias)
    return biases


def _pairs(value: dict[str, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise Refused(_BIAS, "each item must be a pair of a token and a bias")
    return ((key, bias) for key, bias in value)


def _bias_tokens(service: Service, key: Any) -> list[str]:
    """Token ids as texts; whether they are the model's is checked where all biases are."""
    if type(key) is int or (isinstance(key, str) and key.isascii() and key.isdecimal()):
        return [str(key)]
    if not isinstance(key, str):
        raise Refused(_BIAS, "a token must be its id or a text")
    if len(key) > LONGEST_STOP:
        raise Refused(_BIAS, f"a text has at most {LONGEST_STOP} characters")
    return [str(token) for token in service.encode(key, _BIAS, special=False)]


def writing_s(body: LlamaSampling) -> float | None:
    """Seconds that a reply may be written, from its first text."""
    limit_ms = body.t_max_predict_ms or 0
    return limit_ms / 1e3 if limit_ms > 0 else None


def llama_call(service: Service, body: LlamaSampling, path: str) -> ChatCall:
    """What the bodies of all these routes ask for. Raises Refused."""
    seed = seeds_of(None if body.seed in RANDOM_SEEDS else body.seed, 1)[0]  # of all prompts
    own = {"logit_bias": biases_of(service, body.logit_bias), "seed": seed}
    thinking = Thinking(most=body.max_thinking_tokens)
    return ChatCall(path, body.model_copy(update=own), thinking=thinking)


# What llama-server has and we have not, at the values that do nothing.
NEUTRAL: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "min_p": 0.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": 0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.0,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "samplers": ["temperature", "top_k", "top_p"],
    "lora": [],
}


def default_settings(service: Service) -> dict[str, Any]:
    """The settings of a request that names none; a seed of -1 is drawn at random."""
    config = service.model.sampler_defaults
    return {"seed": -1, **_drawn(config, config), **NEUTRAL, "n_predict": -1}


def generation_settings(
    service: Service, request: Request, seed: int | None, stream: bool, as_probs: bool = False
) -> dict[str, Any]:
    """The settings of one request. seed: what the reply was drawn with; as_probs: probabilities are
    shown in place of their logarithms."""
    defaults = service.model.sampler_defaults
    config = request.sampler or SamplerConfig()
    ends = service.model.end_ids if config.ignore_eos else ()
    processors = [each for each in config.processors if isinstance(each, LogitBias)]
    biases = {token: bias for each in processors for token, bias in each.bias.items()}
    stops = request.stop if isinstance(request.stop, list | tuple) else [request.stop]
    return {
        "seed": seed,
        **_drawn(config, defaults),
        **NEUTRAL,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_probs": config.top_tokens or 0,
        "stop": [stop for stop in stops if isinstance(stop, str)],
        "ignore_eos": bool(config.ignore_eos),
        # A bias of null bans its token, as llama-server writes it.
        "logit_bias": [
            {"token": token, "bias": None if bias == -math.inf else bias}
            for token, bias in [*biases.items(), *((end, -math.inf) for end in ends)]
        ],
        "stream": stream,
        "post_sampling_probs": as_probs,
        "timings_per_token": False,
    }


def _drawn(config: SamplerConfig, defaults: SamplerConfig) -> dict[str, Any]:
    """Numbers of 0 and 1 say that all tokens may be drawn."""
    temperature = defaults.temperature if config.temperature is None else config.temperature
    top_k = defaults.top_k if config.top_k is None else config.top_k
    top_p = defaults.top_p if config.top_p is None else config.top_p
    return {
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }


class LlamaLog(TokenLog):
    """Entries with the ids of their tokens."""

    def _token(self, token: int, log: float) -> Entry:
        return {"id": token, **super()._token(token, log)}


def probabilities(entries: Iterable[Entry], as_probs: bool) -> list[dict[str, Any]]:
    """`completion_probabilities`. as_probs: as probabilities, without those that are 0, and not as
    their logarithms."""
    if not as_probs:
        return list(entries)
    shown = []
    for entry in entries:
        likely = [each for top in entry["top_logprobs"] if (each := _probability(top))["prob"] > 0]
        shown.append({**_probability(entry), "top_probs": likely})
    return shown


def _probability(entry: Entry) -> dict[str, Any]:
    fields = {name: entry[name] for name in ("id", "token", "bytes")}
    return fields | {"prob": min(1.0, math.exp(entry["logprob"]))}


_STOP_TYPES = {"eos": "eos", "max_tokens": "limit", "stop": "word", "cancelled": "none"}


class LlamaRenderer(DeltaRenderer):
    """Replies without choices: one, or a list of those to several prompts. The last frame of each
    in a stream says stop."""

    def __init__(self, service: Service, body: LlamaSampling, requests: Sequence[Request]) -> None:
        self._fields, self._streams = body.response_fields, bool(body.stream)
        self._returns_tokens = bool(getattr(body, "return_tokens", False))
        self._as_probs = bool(getattr(body, "post_sampling_probs", False))
        top, progress = getattr(body, "n_probs", None) or 0, bool(body.return_progress)
        super().__init__(service, requests, body, alternatives=top, progress=progress)
        self.keeps_settled = top > 0

    def new_log(self, request: Request) -> TokenLog | None:
        """None where the settled canvases are not those of a reply: a fill's have the suffix."""
        return None if request.parts is not None else LlamaLog(self.service, self.alternatives or 0)

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        if len(replies) == 1:
            return self._answer(0, replies[0])
        return (self._answer(number, collected) for number, collected in enumerate(replies))

    def _answer(self, number: int, collected: CollectedReply) -> dict[str, Any]:
        reply = collected.finished.reply
        answer = {
            **self._end(number, collected.finished),
            "content": reply.text,
            "tokens": reply.token_ids if self._returns_tokens else [],
        }
        if self.alternatives and (entries := self.entries(number, collected)) is not None:
            answer["completion_probabilities"] = probabilities(entries, self._as_probs)
        return _only(answer, self._fields) if self._fields else answer

    def extra(self, fields: Frame) -> Frame:
        return {"index": 0, "content": "", "tokens": [], "stop": False} | fields

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        ids = [entry["id"] for entry in tokens or ()]
        frame = self.extra({"index": number, "content": piece, "tokens": ids})
        if self.alternatives and tokens is not None:
            frame["completion_probabilities"] = probabilities(tokens, self._as_probs)
        yield frame

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        yield {**self._end(number, end), "content": "", "tokens": []}

    def _end(self, number: int, end: Finished) -> Frame:
        """All but the text and its tokens: what llama-server sends at the end."""
        reply, account, request = end.reply, end.account, self.requests[number]
        seed, decode = account.seed, self.service.model.tokenizer.decode
        return {
            "index": number,
            "id_slot": -1 if account.slot is None else account.slot,
            "stop": True,
            "stop_type": _STOP_TYPES[reply.stop_reason],
            "stopping_word": reply.stop or "",
            "model": self.service.name,
            "tokens_predicted": account.output_tokens,
            "tokens_evaluated": account.prompt_tokens,
            "tokens_cached": account.cached_tokens,
            "generation_settings": generation_settings(
                self.service, request, seed, self._streams, self._as_probs
            ),
            "prompt": decode(request.ids or (), skip_special=False),
            "has_new_line": "\n" in reply.text,
            "truncated": False,
            "timings": objects.timings(account),
            **self.warned(reply),
            **self.verified(reply),
        }


def _only(answer: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The fields of an answer that there are, each named by its path: "timings/prompt_n"."""
    fields = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            fields[path] = value
    return fields


COMPLETION_PATH = "/completion"


def parse_completion(service: Service, body: LlamaBody) -> list[Request]:
    """One request for each prompt, all of one seed. Raises Refused."""
    given = prompts_in(body.prompt, "prompt", service.settings.max_choices)
    prompts = prompts_read(service, body, given)
    call = replace(
        llama_call(service, body, COMPLETION_PATH),
        alternatives=body.n_probs or None,
        limit=body.max_tokens if body.n_predict is None else body.n_predict,
        sized=("prompt", "n_predict", "n_probs"),
    )
    return requests_of(service, call, (_made(service, prompt) for prompt in prompts))


def _made(service: Service, parts: str | list[int | str | Patches]) -> Prompt:
    """Raises Refused."""
    pictures: list[PlacedPicture] = []
    ids = service.raw_prompt(parts, COMPLETION_PATH, pictures=pictures)
    check_slot(service, len(ids), LONG_PROMPT, "prompt")
    return Prompt(ids, (), tuple(pictures))


LLAMA_COMPLETION = Dialect(
    name="completion",
    path=COMPLETION_PATH,
    tag="llama-server",
    help="A completion as llama-server has it.",
    body_type=LlamaBody,
    parse=parse_completion,
    renderer=LlamaRenderer,
    streams=lambda body: bool(body.stream),
    writing_s=writing_s,
)

INFILL_PATH = "/infill"


def parse_infill(service: Service, body: InfillBody) -> list[Request]:
    """Raises Refused."""
    extra = [_extra(part, f"input_extra[{i}]") for i, part in enumerate(body.input_extra or ())]
    text = "".join(extra) + body.input_prefix + (body.prompt or "")
    ids = service.raw_prompt(text, INFILL_PATH, special=False, field="input_prefix")
    call = replace(llama_call(service, body, INFILL_PATH), limit=body.n_predict)
    if body.input_suffix and call.limit != 0:  # else the text goes on until it ends
        call = before(service, call, body.input_suffix, "input_suffix")
    return requests_of(service, call, [ids])


def _extra(part: Mapping[str, Any], where: str) -> str:
    """A text of another file, after its name."""
    text, name = part.get("text"), part.get("filename") or ""
    if not isinstance(text, str):
        raise Refused(f"{where}.text", "must be text")
    if not isinstance(name, str):
        raise Refused(f"{where}.filename", "must be text")
    return f"--- {name or 'snippet'} ---\n{text}\n"


INFILL = Dialect(
    name="infill",
    path=INFILL_PATH,
    tag="llama-server",
    help="Text between a prefix and a suffix, as llama-server has it.",
    body_type=InfillBody,
    parse=parse_infill,
    renderer=LlamaRenderer,
    streams=lambda body: bool(body.stream),
    writing_s=writing_s,
)
