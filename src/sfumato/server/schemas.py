"""Bodies: their strict base, the fields that those share which ask for a reply, and the JSON
schemas of fields for which the code checks more than their Python types say.

A field is honoured, or refused but for the values that ask for nothing (`Only`), or ignored. All
routes that generate take the fields of `Neutral` and `Grammars`, and a body has one grammar at
most. Bodies write out their fields and types; ranges and help texts come from `options/`. The JSON
schemas are for the API description alone, so that bodies that it allows are accepted; what it
cannot say stands in openapi.py. Ranges that depend on the model are the engine's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError

from sfumato.diffusion import sampler_config
from sfumato.diffusion.constraints.grammar import LONGEST_SOURCE, MOST_TEXTS
from sfumato.media.patches import Patches
from sfumato.options import MODES, PACES, SAMPLERS, SETTINGS, setting
from sfumato.options.limits import (
    LONGEST_STOP,
    MOST_BIAS,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_HOLES,
    MOST_STOPS,
    MOST_TOKENS,
)
from sfumato.refused import Refused
from sfumato.values import Kind, Number

SETTING_OF = {each.request_field: each for each in SETTINGS if each.request_field}
"""Name of a field → its setting."""


def within(name: str) -> Any:
    """The range of a setting, for the annotation of a field whose body checks it. The other
    ranges are checked where the settings become a `SamplerConfig`."""
    kind = setting(name).request_kind
    assert isinstance(kind, Number)
    open_low = kind.low in kind.without
    return Field(gt=kind.low, le=kind.high) if open_low else Field(ge=kind.low, le=kind.high)


def greatest(name: str) -> float | None:
    """The greatest value of a field that is a number."""
    kind = SETTING_OF[name].request_kind
    assert isinstance(kind, Number)
    return kind.high


def add_setting(name: str, schema: dict[str, Any]) -> None:
    """Adds range and description of the setting of a field, if it has one, to its JSON schema. A
    description that is there is a note, and stays behind the table's."""
    if name not in SETTING_OF:
        return
    chosen = SETTING_OF[name]
    schema |= _range(chosen.request_kind)
    help_text = f"{chosen.help[0].upper()}{chosen.help[1:]}."
    note = schema.get("description")
    schema["description"] = f"{help_text} {note}" if note else help_text


def _range(kind: Kind) -> dict[str, Any]:
    """The bounds of a number as JSON schema has them; empty for another kind."""
    if not isinstance(kind, Number):
        return {}
    low = "exclusiveMinimum" if kind.low in kind.without else "minimum"
    high = "exclusiveMaximum" if kind.high in kind.without else "maximum"
    return {low: kind.low} | ({} if kind.high is None else {high: kind.high})


Schema = dict[str, Any]

# Thinking tokens that an effort allows; None: all but what the answer needs.
EFFORTS = {
    "none": 0,
    "minimal": 0,
    "low": 512,
    "medium": 2048,
    "high": None,
    "xhigh": None,
    "max": None,
}

NAME = "^[A-Za-z0-9_.-]{1,128}$"  # of a tool
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def open_object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object that may have any further field."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object whose unknown fields pass where they are null."""
    return open_object(required, optional) | {"additionalProperties": NULL}


def list_of(items: Schema, least: int = 0) -> Schema:
    """least: items."""
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


IDS = list_of({"type": "integer", "minimum": 0})
PROMPT_IDS = IDS | {"minItems": 1}
PROMPTS = either(TEXT, list_of(TEXT, 1), PROMPT_IDS, list_of(PROMPT_IDS, 1))
_MIXED = list_of(either({"type": "integer", "minimum": 0}, TEXT), 1)
_TEXT_PARTS = list_of(open_object({"type": {"const": "text"}, "text": TEXT}))
MIXED_PROMPT = either(
    TEXT,
    _MIXED,
    *(
        open_object(one) | {"additionalProperties": False}
        for one in ({"prompt_string": TEXT}, {"content": _TEXT_PARTS})
    ),
)
MIXED_PROMPTS = either(MIXED_PROMPT, list_of(MIXED_PROMPT, 1))
EMBEDDING_INPUT = either(MIXED_PROMPT, list_of(MIXED_PROMPT, 1) | {"maxItems": 2048})
MAX_TOKENS = either({"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}, {"const": -1}, NULL)
MAX_TOKENS_OR_NONE = either({"type": "integer", "minimum": -1, "maximum": MOST_TOKENS}, NULL)
STOP = either(
    {"type": "string", "maxLength": LONGEST_STOP},
    list_of({"type": "string", "maxLength": LONGEST_STOP}) | {"maxItems": MOST_STOPS},
    NULL,
)
BIAS = either(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        "maxProperties": MOST_BIASES,
    },
    NULL,
)
_BIAS_OR_BAN: Schema = either(
    {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS}, {"const": False}
)
LLAMA_BIAS = either(
    {
        "type": "object",
        "propertyNames": {"maxLength": LONGEST_STOP},
        "additionalProperties": _BIAS_OR_BAN,
        "maxProperties": MOST_BIASES,
    },
    {
        "type": "array",
        "maxItems": MOST_BIASES,
        "items": {
            "type": "array",
            "prefixItems": [
                either({"type": "integer", "minimum": 0}, TEXT | {"maxLength": LONGEST_STOP}),
                _BIAS_OR_BAN,
            ],
            "minItems": 2,
            "maxItems": 2,
        },
    },
    NULL,
)
SAMPLER: Schema = {"enum": [*SAMPLERS, None]}
PACE: Schema = {"enum": [*PACES, None]}
MODE: Schema = {"enum": [*MODES, None]}
EFFORT: Schema = {"enum": [*EFFORTS, None]}


def with_settings(schema: Schema) -> None:
    """Completes the schema of a body."""
    schema["additionalProperties"] = NULL
    for name, of_field in schema["properties"].items():
        add_setting(name, of_field)


TEXTS = either(TEXT, _TEXT_PARTS)
_NAMED: Schema = {"name": {}}  # of a tool's message alone it is read
_ARGUMENTS = either({"type": "object"}, {"const": ""}, {"const": "{}"}, NULL)
_CALL = open_object(
    {
        "function": open_object(
            {"name": {"type": "string", "pattern": NAME}}, {"arguments": _ARGUMENTS}
        )
    },
    {"id": either(TEXT, NULL), "type": {"const": "function"}},
)
MESSAGES = list_of(
    either(
        closed({"role": {"enum": ["system", "developer", "user"]}, "content": TEXTS}, _NAMED),
        closed(
            {"role": {"const": "assistant"}},
            _NAMED
            | {"content": either(TEXTS, NULL), "tool_calls": either(list_of(_CALL), NULL)}
            | {"refusal": either(TEXT, NULL), "annotations": {}, "audio": NULL}
            | {"function_call": NULL, "reasoning_content": {}, "reasoning": {}},
        ),
        closed(
            {"role": {"const": "tool"}, "content": TEXTS},
            {"name": either(TEXT, NULL), "tool_call_id": either(TEXT, NULL)},
        ),
    ),
    least=1,
)

_FUNCTION = open_object(
    {"name": {"type": "string", "pattern": NAME}},
    {
        "description": either(TEXT, NULL),
        "parameters": either({"type": "object"}, NULL),
        "strict": either(FLAG, NULL),
    },
)
TOOLS = either(list_of(open_object({"type": {"const": "function"}, "function": _FUNCTION})), NULL)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    open_object({"type": {"const": "function"}, "function": open_object({"name": TEXT})}),
)

_COUNT = {"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}
_CHOICES = list_of(TEXT | {"minLength": 1}, 1) | {"maxItems": MOST_CHOICES, "uniqueItems": True}
PARTS = list_of(
    either(
        TEXT,
        *(
            closed({name: values})
            for name, values in (("tokens", _COUNT), ("at_most", _COUNT), ("choices", _CHOICES))
        ),
    ),
    least=1,
) | {"maxItems": 2 * MOST_HOLES + 1}
EXTRA = either(list_of(open_object({"text": TEXT}, {"filename": either(TEXT, NULL)})), NULL)


# Only the first wrong item of a list is reported: an error for each of millions takes gigabytes.
First = Field(fail_fast=True)
Texts = Annotated[list[str], First]
Ids = Annotated[list[int], First]
Objects = Annotated[list[dict[str, Any]], First]


def at_most(count: int) -> BeforeValidator:
    """Refuses an object of more fields before any of them is read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many", f"at most {count} fields")
        return value

    return BeforeValidator(check)


MOST_NAMED = 20  # of unknown fields
UNKNOWN_FIELD = "unknown; remove it, or start the server with --lenient"
"""What an error says of one."""


class Unknown:
    """Unknown fields of a body: refused, or, by a lenient server, left out. Holds the names of the
    first ones, and how many there are."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient, self.count = lenient, 0
        self.named: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Raises Refused unless the server is lenient."""
        for name in names:
            self.count += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(name)
        if self.count and not self.lenient:
            more = self.count - len(self.named)
            *first, last = self.named
            fields = (*first, f"{last} and {more:,} more" if more else last)
            raise Refused(fields, UNKNOWN_FIELD, code="unknown_field")

    def check(self, value: Mapping[str, Any], known: Collection[str], where: str) -> None:
        """Looks for fields of an object that are not known, and not null. Raises Refused."""
        unknown = sorted(name for name in value if name not in known and value[name] is not None)
        self.add(f"{where}.{name[:100]}" for name in unknown)

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return ", ".join(self.named) + (f" and {more:,} more" if more else "")


@dataclass
class Envelope:
    """What belongs to a body beside its fields."""

    unknown: Unknown = field(default_factory=Unknown)
    since: float | None = None  # when the body had arrived, by the engine's clock
    waited_s: float = 0.0  # until the model that answers was loaded
    owner: str = ""  # whose body it is: a digest of the API key
    echo: Any = None  # what a dialect keeps of the fields that are dropped before the reply
    pictures: dict[str, Patches] = field(default_factory=dict)  # that were read, by their field
    # Within, other bodies may be read: work that waits, and does not use this body, belongs there.
    apart: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


class Body(BaseModel):
    """Strict: no text for a number, no NaN. Unknown fields have been looked for before."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=with_settings,
    )

    _envelope: Envelope = PrivateAttr(default_factory=Envelope)

    @property
    def envelope(self) -> Envelope:
        return self._envelope

    @property
    def asked_names(self) -> tuple[str, ...]:
        """Names of the model that is asked for, of which the first that is registered counts; the
        model that is loaded answers to others."""
        given = getattr(self, "model", None)
        return () if given is None else (given,)

    @property
    def adapter_number(self) -> int | None:
        """The number of the adapter that is asked for, in APIs that number them."""
        return None


Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
ModelName = Annotated[
    str | None, Field(description="A registered model; else the one that is loaded answers.")
]
AtTheEnd = Annotated[Any, Field(description="Accepted and ignored: the last piece has them.")]


class Only(AfterValidator):
    """Null and the `neutral` values pass; anything else is refused with `why`."""

    def __init__(self, *neutral: Any, why: str) -> None:
        values = (None, *neutral)

        def check(value: Any) -> Any:
            for good in values:
                if value == good and isinstance(value, bool) == isinstance(good, bool):
                    return value
            raise ValueError(why)

        super().__init__(check)
        shown = " or ".join(json.dumps(value) for value in neutral) or "null"
        schema = {"enum": list(values), "description": f"Refused unless {shown}: {why}."}
        object.__setattr__(self, "schema", schema)  # an AfterValidator is frozen

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self.__dict__["schema"]
        return schema


Fields = TypeVar("Fields", bound=BaseModel)


def without_effect(ignored: str = "", **refused: Only) -> Callable[[type[Fields]], type[Fields]]:
    """Adds fields to a body that change nothing. ignored: names with spaces between them, whose
    values do not matter; refused: those of which only values that ask for nothing pass."""

    def added(body: type[Fields]) -> type[Fields]:
        fields: dict[str, Any] = dict.fromkeys(ignored.split(), (Ignored, None))
        fields |= {name: (Annotated[Any, only], None) for name, only in refused.items()}
        module, doc = body.__module__, body.__doc__
        return create_model(body.__name__, __base__=body, __module__=module, __doc__=doc, **fields)

    return added


_TOP_P = "is not supported; use top_p"
_CANVAS = "is a field of /v1/completions and /v1/chat/completions"
_PENALTY = "penalties are not supported: the tokens of a canvas are drawn together"


@without_effect(
    "cache_prompt id_slot",
    min_p=Only(0, why=_TOP_P),
    repetition_penalty=Only(1, why=_PENALTY),
    length_penalty=Only(1, why="there is no beam search here"),
    use_beam_search=Only(False, why="there is no beam search here"),
    best_of=Only(1, why="is not supported; ask for n replies and choose"),
    skip_special_tokens=Only(True, why="markers are never part of a reply's text"),
    frequency_penalty=Only(0, why=_PENALTY),
    presence_penalty=Only(0, why=_PENALTY),
    prompt_logprobs=Only(why="is a field of /v1/completions"),
    # What vLLM's router adds to every body.
    no_stop_trim=Only(False, why="a stop text is no part of a reply"),
    return_hidden_states=Only(False, why="is not supported; use /v1/embeddings"),
    **dict.fromkeys(
        ("separate_reasoning", "stream_reasoning", "include_reasoning"),
        Only(True, why="a thought is a part of its own in every reply"),
    ),
)
class Neutral(BaseModel):
    """Fields that clients send to every route that generates, at values that ask for nothing."""

    # vLLM's
    vllm_xargs: Annotated[Any, Only({}, why=_CANVAS)] = None
    logprob_token_ids: Annotated[Any, Only([], why=_CANVAS)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False, why=_CANVAS)] = None
    # llama-server's
    timings_per_token: AtTheEnd = None
    return_progress: bool | None = Field(
        None,
        description="Send how far the prompt is encoded: streams of chats, responses, /completion.",
    )


_OBJECT: Schema = {"type": "object"}
_SCHEMA = either(_OBJECT, {"type": "boolean"})
JsonSchema = Annotated[dict[str, Any] | bool, WithJsonSchema(_SCHEMA)]
SchemaOrText = Annotated[
    dict[str, Any] | bool | str | None,
    WithJsonSchema(either(*_SCHEMA["anyOf"], {"type": "string"}, NULL)),
]
Grammar = Annotated[str, Field(max_length=LONGEST_SOURCE)]
Choices = Annotated[list[str], First, Field(min_length=1, max_length=MOST_TEXTS)]
_WHITE_SPACE = "cannot be set: white space is bounded here"


@without_effect("description")
class NamedSchema(Body):
    """OpenAI's `json_schema`."""

    name: str | None = Field(None, description="Accepted and ignored.")
    schema_: JsonSchema | None = Field(None, alias="schema", description="None: any object.")
    strict: bool | None = Field(None, description="The schema is held whether or not it is true.")


class ResponseFormat(Body):
    """What the reply has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="Of a json_object, as llama-server has it."
    )


@without_effect(
    "disable_fallback",
    disable_any_whitespace=Only(False, why=_WHITE_SPACE),
    disable_additional_properties=Only(
        False, why="is not supported; set additionalProperties in the schema"
    ),
    whitespace_pattern=Only(why=_WHITE_SPACE),
    structural_tag=Only(why="is not supported; use tools with strict"),
)
class StructuredOutputs(Body):
    """vLLM's; one of them."""

    json_: SchemaOrText = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="GBNF or Lark.")
    json_object: bool | None = None


@without_effect(
    "guided_decoding_backend",
    guided_whitespace_pattern=Only(why=_WHITE_SPACE),
)
class Grammars(BaseModel):
    """Fields of every body that asks for a reply."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = Field(None, description="The same as structured_outputs.json.")
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    json_schema: JsonSchema | None = Field(None, description="As llama-server has it.")
    grammar: Grammar | None = Field(None, description="GBNF or Lark; an empty one is none.")


LONGEST_CANVAS = 4096
"""Tokens and positions in a body at most, before the checkpoint's canvas length is looked at."""

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Canvas = Annotated[list[Token], First, Field(max_length=LONGEST_CANVAS)]
_CONSTRAINED = "is not supported; leave it out: the probabilities are the same"
NamedTokens = Annotated[list[Token], First, Field(max_length=sampler_config.MOST_NAMED)]


@without_effect(diffusion_constrained=Only(False, 0, why=_CONSTRAINED))
class VllmXargs(Body):
    """What vLLM's `vllm_xargs` has for diffusion models."""

    diffusion_seed_canvas: _Canvas | None = Field(
        None, description="What the first canvas begins as: a token for each of its positions."
    )
    diffusion_pinned: _Canvas | None = Field(
        None, description="Positions that keep their token of the seed canvas at every step."
    )
    diffusion_canvas_length: int | None = Field(
        None, ge=1, le=LONGEST_CANVAS, description="The same as canvas_length."
    )
    diffusion_max_steps: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Steps per canvas at most; the server's if fewer."
    )
    diffusion_read_only: bool | Literal[0, 1] | None = Field(
        None,
        description="Read the canvas and write no reply: the most probable token of each "
        "position after the last step, log probabilities at temperature 1.",
    )


class Sampling(Neutral, Grammars, Body):
    """How a reply is sampled and sent; null means the checkpoint's default.

    The table of settings describes the fields. A description here is a note for HTTP alone.
    """

    temperature: float | None = None
    top_p: float | None = Field(None, description="At 0 the most probable token.")
    top_k: Annotated[int | None, within("top_k")] = Field(None, description="0 and -1: all.")
    seed: Annotated[int | None, within("seed")] = Field(
        None, description="A negative one too, as in OpenAI's API."
    )
    stop: Annotated[str | Texts | None, WithJsonSchema(STOP)] = Field(
        None, description="An empty text is none."
    )
    logit_bias: Annotated[
        dict[str, float] | None,
        at_most(MOST_BIASES),
        WithJsonSchema(BIAS),
    ] = Field(None, description="-100 bans a token.")
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    mode: Annotated[str | None, WithJsonSchema(MODE)] = None
    max_steps: int | None = None
    sampler: Annotated[str | None, WithJsonSchema(SAMPLER)] = None
    pace: Annotated[str | None, WithJsonSchema(PACE)] = None
    entropy_bound: float | None = None
    count: int | None = None
    threshold: float | None = None
    margin: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability: int | None = None
    confidence: float | None = None
    settle_at_end: bool | None = None
    patience: int | None = None
    canvas_length: int | None = None
    self_conditioning: bool | None = None
    soft_skip: float | None = None
    soft_top_k: Annotated[int | None, within("soft_top_k")] = None
    max_thinking_tokens: Annotated[int | None, within("max_thinking_tokens")] = None
    retry_empty: bool | None = None
    verify: Literal["report", "abstain"] | None = Field(
        None, description="Replies have the field `verification` then."
    )
    timeout: Annotated[float | None, within("timeout_s")] = None
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_drafts: bool | None = Field(None, description="Also a frame for every settled canvas.")


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for what fits")
    return value


MaxTokens = Annotated[
    int | None,
    Field(ge=-1, le=MOST_TOKENS),
    AfterValidator(_not_zero),
    WithJsonSchema(MAX_TOKENS),
]
Messages = Annotated[Objects, WithJsonSchema(MESSAGES)]
Tools = Annotated[Objects | None, WithJsonSchema(TOOLS)]
Continue = Annotated[
    bool | None,
    Field(description="Continue the last message, an assistant's; null: where it is one."),
]
AddPrompt = Annotated[
    bool | None, Field(description="False: only where the last message is continued.")
]


@without_effect("include_obfuscation")
class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send usage in a chunk of its own.")
    continuous_usage_stats: AtTheEnd = None


class TemplateKwargs(Body):
    enable_thinking: bool | None = Field(None, description="Let the model think first.")


class Generation(Sampling):
    """What chat and text completions share."""

    model: ModelName = None
    max_tokens: MaxTokens = Field(None, description="Visible tokens at most; -1: what fits.")
    n_predict: MaxTokens = Field(None, description="llama-server's name of max_tokens.")
    n: int | None = Field(None, ge=1, description="Replies; the i-th has the seed plus i.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")
    vllm_xargs: VllmXargs | None = Field(None, description="A canvas that the client gives.")
    logprob_token_ids: NamedTokens | None = Field(
        None, description="Tokens whose log probabilities are named at every position."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens "token_id:5" in log probabilities.'
    )
