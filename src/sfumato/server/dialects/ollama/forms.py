"""Ollama's bodies, its form of errors, and times as Ollama writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.server.http.errors import ApiError, ErrorForm
from sfumato.server.schemas.body import Body, Ids, Ignored, Objects, Only
from sfumato.server.schemas.generation import Sampling
from sfumato.server.schemas.json_schemas import (
    IDS,
    NAME,
    NULL,
    TEXT,
    TOOLS,
    Schema,
    closed,
    either,
    list_of,
    within,
)

LEVELS = ("low", "medium", "high", "max")
THINK: Schema = {"enum": [True, False, *LEVELS, None]}
FORMAT = either({"enum": ["", "json", None]}, {"type": "object"})
NO_IDS = either(IDS | {"maxItems": 0}, NULL)
_ANY: Schema = {}
_NO_IMAGES: Schema = {"images": either({"const": []}, NULL)}
_CALL = closed(
    {"function": closed({"name": {"type": "string", "pattern": NAME}}, {"arguments": _ANY})},
    {"id": _ANY, "type": {"const": "function"}},
)
_CALL["properties"]["function"]["properties"] |= {
    "arguments": either({"type": "object"}, NULL),
    "index": _ANY,
    "description": _ANY,
}
_TEXT = {"content": TEXT}
MESSAGES = either(
    list_of(
        either(
            closed({"role": {"enum": ["system", "developer", "user"]}, **_TEXT}, _NO_IMAGES),
            closed(
                {"role": {"const": "assistant"}},
                _NO_IMAGES
                | {"content": either(TEXT, NULL), "thinking": _ANY}
                | {"tool_calls": either(list_of(_CALL), NULL), "tool_name": NULL},
            ),
            closed(
                {"role": {"const": "tool"}, **_TEXT},
                _NO_IMAGES
                | {name: either(TEXT, NULL) for name in ("tool_name", "name", "tool_call_id")},
            ),
        )
    ),
    NULL,
)

_PENALTY = "penalties are not supported: the tokens of a canvas are drawn together"
_IMAGES = "images are not supported yet"
Think = Annotated[
    Any,
    WithJsonSchema(THINK),
    Field(description="true, false, or low, medium, high, max: tokens of a thought (false)."),
]
Format = Annotated[
    Any,
    WithJsonSchema(FORMAT),
    Field(description="json, or the JSON schema that the answer has to match."),
]


class OllamaOptions(Sampling):
    """Ollama's options, and the fields of our own."""

    num_predict: int | None = Field(
        None, ge=-2, le=MOST_TOKENS, description="Tokens at most; -1, -2, 0: what fits."
    )
    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    num_gqa: Ignored = None
    num_thread: Ignored = None
    main_gpu: Ignored = None
    low_vram: Ignored = None
    numa: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    vocab_only: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    embedding_only: Ignored = None
    penalize_newline: Ignored = None
    repeat_last_n: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    mirostat: Annotated[Any, Only(0, why="is not supported")] = None
    repeat_penalty: Annotated[Any, Only(0, 1, why=_PENALTY)] = None
    tfs_z: Annotated[Any, Only(0, 1, why="is not supported; use top_p")] = None
    typical_p: Annotated[Any, Only(0, 1, why="is not supported; use top_p")] = None


class OllamaGeneration(Body):
    """What both routes share."""

    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    options: OllamaOptions | None = None
    stream: bool | None = Field(None, description="False: one body; else lines of JSON.")
    stream_drafts: bool | None = Field(None, description="Also a line for every step.")
    format: Format = None
    think: Think = None
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    keep_alive: Ignored = None
    truncate: Ignored = None
    shift: Ignored = None


class OllamaChatBody(OllamaGeneration):
    messages: Annotated[Objects | None, WithJsonSchema(MESSAGES)] = Field(
        None, description="Empty: nothing is generated; the model is loaded already."
    )
    tools: Annotated[Objects | None, WithJsonSchema(TOOLS)] = None


class OllamaGenerateBody(OllamaGeneration):
    prompt: str | None = Field(None, description="Empty: nothing is generated.")
    suffix: str | None = Field(None, description="What comes after the reply.")
    system: str | None = None
    raw: bool | None = Field(None, description="True: no chat template; markers are tokens.")
    template: Annotated[Any, Only("", why="cannot be set; use raw")] = None
    context: Annotated[Ids | None, WithJsonSchema(NO_IDS)] = Field(
        None, description="Refused unless empty: send messages to /api/chat."
    )
    images: Annotated[Any, Only([], why=_IMAGES)] = None
    width: Annotated[Any, Only(0, why="no images are made here")] = None
    height: Annotated[Any, Only(0, why="no images are made here")] = None
    steps: Annotated[Any, Only(0, why="no images are made here; use options.max_steps")] = None


class OllamaShowBody(Body):
    model: str | None = None
    name: str | None = Field(None, description="The same as model.")
    verbose: Ignored = None
    system: Ignored = None
    template: Ignored = None
    options: Ignored = None


_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA_ERRORS = ErrorForm(error_body, name="OllamaError", schema=_SCHEMA)


def now() -> str:
    """The time of the day, in UTC."""
    return shown(datetime.now(UTC))


def shown(moment: datetime) -> str:
    """moment: in UTC."""
    return moment.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))
