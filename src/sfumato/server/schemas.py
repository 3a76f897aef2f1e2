"""The bodies of requests, as pydantic models: names, types, and what the API description says.

A field is honoured, or refused but for the values that ask for nothing (`only`), or ignored
(`Ignored`). Ranges that depend on the model are the engine's business.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sfumato.diffusion.config import MOST_TOP

MOST_ALTERNATIVES = MOST_TOP  # of each token

Ignored = Annotated[Any, Field(description="Accepted and ignored.")]


def only(*neutral: Any, why: str) -> AfterValidator:
    """Null and the `neutral` values pass; anything else is refused, and `why` is told."""

    def check(value: Any) -> Any:
        for good in (None, *neutral):
            if value == good and isinstance(value, bool) == isinstance(good, bool):
                return value
        raise ValueError(why)

    return AfterValidator(check)


NoPenalty = Annotated[
    Any,
    only(0, why="penalties are not supported: the tokens of a canvas are drawn together"),
    Field(description="Refused unless 0."),
]
NoSchema = Annotated[
    Any,
    only({"type": "text"}, why="JSON output by schema is not supported yet; ask for text"),
    Field(description='Refused unless {"type": "text"}.'),
]
NoAudio = Annotated[
    Any, only(why="audio is not supported"), Field(description="Refused unless null.")
]
TextOnly = Annotated[
    Any,
    only(["text"], why="only text is supported"),
    Field(description='Refused unless ["text"].'),
]
NoFunctions = Annotated[
    Any,
    only([], "none", "auto", why="is long deprecated; use tools and tool_choice"),
    Field(description="Refused unless null or empty; tools took their place."),
]
NoStore = Annotated[
    Any, only(False, why="nothing is stored here"), Field(description="Refused unless false.")
]
NoSearch = Annotated[
    Any, only(why="there is no web search here"), Field(description="Refused unless null.")
]
NoModeration = Annotated[
    Any, only(why="there is no moderation here"), Field(description="Refused unless null.")
]
MediumOnly = Annotated[
    Any,
    only("medium", why="cannot be set; say in a message how long the answer should be"),
    Field(description='Refused unless "medium".'),
]
NoSuffix = Annotated[
    Any,
    only("", why="filling in before a suffix is not supported yet"),
    Field(description="Refused unless empty."),
]
OneOnly = Annotated[
    Any,
    only(1, why="is not supported; ask for n replies and choose"),
    Field(description="Refused unless 1."),
]
NoEcho = Annotated[
    Any,
    only(False, why="is not supported; the prompt is known to the client"),
    Field(description="Refused unless false."),
]


class Body(BaseModel):
    """Strict: no unknown field, no text for a number, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(Body):
    """How a reply is drawn and sent; what is null is the checkpoint's own choice."""

    temperature: float | None = Field(None, description="Scales the temperature schedule.")
    top_p: float | None = Field(None, description="Draw from the likeliest share only.")
    top_k: int | None = Field(None, description="Draw from the k likeliest; 0 and -1: all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed, same text.")
    stop: str | list[str] | None = Field(None, description="Texts that end the reply.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Token id → -100 … 100, added to its score; -100 bans it."
    )
    min_tokens: int | None = Field(None, description="No end token before so many tokens.")
    ignore_eos: bool | None = Field(None, description="End tokens are banned.")
    max_steps: int | None = Field(None, description="Denoising steps per canvas at most.")
    sampler: str | None = Field(None, description="entropy-bound, fixed-count or threshold.")
    entropy_bound: float | None = Field(None, description="Nats; of the entropy-bound sampler.")
    count: int | None = Field(None, description="Positions a step; of the fixed-count sampler.")
    threshold: float | None = Field(None, description="Probability; of the threshold sampler.")
    margin: float | None = Field(None, description="Over the runner-up; of the threshold sampler.")
    t_min: float | None = Field(None, description="Temperature after the last step.")
    t_max: float | None = Field(None, description="Temperature at the first step.")
    stability: int | None = Field(None, description="Steps that a settled canvas stays the same.")
    confidence: float | None = Field(None, description="Mean nats under which it has settled.")
    canvas_length: int | None = Field(None, description="Tokens of a canvas.")
    self_conditioning: bool | None = Field(None, description="False measures what it is worth.")
    soft_skip: float | None = Field(None, description="Mass self-conditioning may leave out.")
    soft_top_k: int | None = Field(None, description="Likeliest tokens that it goes by; all.")
    max_thinking_tokens: int | None = Field(None, ge=0, description="Then the answer begins.")
    retry_empty: bool | None = Field(None, description="Draw an empty answer again (true).")
    timeout: float | None = Field(None, gt=0, description="Seconds until the request fails.")
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_drafts: bool | None = Field(None, description="Send draft and settled frames too.")


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send usage in a chunk of its own.")
    include_obfuscation: Ignored = None


class TemplateKwargs(Body):
    enable_thinking: bool | None = Field(None, description="Let the model think first.")


class Generation(Sampling):
    """What chat and text completions share."""

    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    max_tokens: int | None = Field(None, ge=1, description="Visible tokens at most.")
    n: int | None = Field(None, ge=1, description="Replies; the i-th has the seed plus i.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Told in the audit log.")
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None


class ChatBody(Generation):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='none, auto, required, or {"type": "function", "function": {"name": …}}.'
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning_effort: str | None = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    response_format: NoSchema = None
    audio: NoAudio = None
    modalities: TextOnly = None
    functions: NoFunctions = None
    function_call: NoFunctions = None
    store: NoStore = None
    web_search_options: NoSearch = None
    moderation: NoModeration = None
    verbosity: MediumOnly = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None


class CompletionBody(Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES, description="Alternatives.")
    best_of: OneOnly = None
    echo: NoEcho = None
    suffix: NoSuffix = None


class LlamaBody(Sampling):
    """llama-server's own completion. What it has and we have not is refused unless neutral."""

    prompt: str | list[int]
    n_predict: int | None = Field(None, ge=-1, description="Tokens at most; -1: what fits.")
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    n_keep: Ignored = None
    min_p: Annotated[Any, only(0, why="min_p is not supported; use top_p")] = None
    typical_p: Annotated[Any, only(1, why="typical_p is not supported; use top_p")] = None
    repeat_penalty: Annotated[Any, only(1, why="penalties are not supported")] = None
    repeat_last_n: Ignored = None
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None
    mirostat: Annotated[Any, only(0, why="mirostat is not supported")] = None
    grammar: Annotated[Any, only("", why="grammars are not supported")] = None
    json_schema: Annotated[Any, only({}, why="JSON schemas are not supported yet")] = None
    n_probs: Annotated[Any, only(0, why="use /v1/completions with logprobs")] = None


class TokenizeBody(Body):
    content: str
    add_special: bool = Field(False, description="Put bos in front.")
    parse_special: bool = Field(True, description="Read markers as their tokens.")
    with_pieces: bool = Field(False, description="Answer objects with id and piece.")


class DetokenizeBody(Body):
    tokens: list[int]


class TemplateBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool = True
