"""Anthropic's bodies, messages and the count of a prompt's tokens, and its form of errors.

Content blocks are read one by one where a conversation is made of them; the bodies hold them as
they came."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.server.http.errors import ApiError, ErrorForm
from sfumato.server.schemas.body import Body, Ignored, Objects, Only, Texts
from sfumato.server.schemas.generation import JsonSchema, Sampling
from sfumato.server.schemas.json_schemas import NAME, NULL, TEXT, Schema, closed, either, list_of

_ANY: Schema = {}
_CACHED = {"cache_control": _ANY}


def _block(name: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": name}, **required}, optional)


_TEXT = _block("text", {"text": TEXT}, _CACHED | {"citations": _ANY})
_TEXTS = either(TEXT, list_of(_TEXT))
_THINKING = _block("thinking", {"thinking": TEXT}, {"signature": _ANY})
_REDACTED = _block("redacted_thinking", {}, {"data": _ANY})
_CALL = _block(
    "tool_use",
    {"id": TEXT, "name": {"type": "string", "pattern": NAME}, "input": {"type": "object"}},
    _CACHED | {"caller": _ANY, "toolset_name": _ANY},
)
_RESULT = _block(
    "tool_result",
    {"tool_use_id": TEXT},
    _CACHED | {"content": either(_TEXTS, NULL), "is_error": _ANY, "toolset_name": _ANY},
)

SYSTEM = either(_TEXTS, NULL)
MESSAGES = list_of(
    either(
        closed({"role": {"const": "system"}, "content": _TEXTS}),
        closed(
            {"role": {"const": "user"}, "content": either(TEXT, list_of(either(_TEXT, _RESULT)))}
        ),
        closed(
            {
                "role": {"const": "assistant"},
                "content": either(TEXT, list_of(either(_TEXT, _THINKING, _REDACTED, _CALL))),
            }
        ),
    ),
    least=1,
)
TOOLS = either(
    list_of(
        closed(
            {"name": {"type": "string", "pattern": NAME}, "input_schema": {"type": "object"}},
            {
                "type": {"enum": ["custom", None]},
                "description": either(TEXT, NULL),
                "strict": either({"type": "boolean"}, NULL),
                "cache_control": _ANY,
                "input_examples": _ANY,
                "eager_input_streaming": _ANY,
                "allowed_callers": _ANY,
                "defer_loading": _ANY,
            },
        )
    ),
    NULL,
)

_HOSTED = "nothing runs here beside the model; run tools in the client"


class ThinkingConfig(Body):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = Field(
        description="disabled, between_tools: no thinking."
    )
    budget_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Of a thought at most; less than max_tokens."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks of thinking have a signature and no text."
    )


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of a tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: one call at most.")


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")
    name: Ignored = None
    strict: Ignored = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Of adaptive thinking: tokens of a thought, as reasoning_effort."
    )
    format: OutputFormat | None = None
    task_budget: Ignored = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=512, description="Written to the audit log.")


class AnthropicPrompt(BaseModel):
    """What a prompt is made of, and fields of Anthropic's API without an effect here."""

    # Before the messages, which are of one turn alone where a thread is continued.
    thread: Annotated[Any, Only(why="no conversation is stored here; send all of its messages")] = (
        None
    )
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    messages: Annotated[Objects, WithJsonSchema(MESSAGES)] = Field(min_length=1)
    system: Annotated[str | Objects | None, WithJsonSchema(SYSTEM)] = None
    tools: Annotated[Objects | None, WithJsonSchema(TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="None: no thinking.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="The same as output_config.format."
    )
    mcp_servers: Annotated[Any, Only([], why=_HOSTED)] = None
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


class MessagesBody(AnthropicPrompt, Sampling):
    max_tokens: int = Field(
        ge=0, le=MOST_TOKENS, description="Thoughts included; 0: the prompt is only encoded."
    )
    stop_sequences: Texts | None = Field(None, description="The same as stop.")
    metadata: Metadata | None = None
    container: Annotated[Any, Only(why=_HOSTED)] = None
    fallbacks: Annotated[Any, Only([], why="one model is loaded")] = None
    betas: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None


class CountBody(AnthropicPrompt, Body):
    """A prompt whose tokens are counted."""

    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Accepted and ignored.")
    betas: Ignored = None


OVERLOADED = 529
_BUSY = ("memory", "bodies_busy", "queue_full")  # codes of a 503 that passes by itself
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

# error.details of a field that is refused, by which clients know that they can go on without it.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error"],
}


def status_of(error: ApiError) -> int:
    """529 for what passes by itself; a server that is not ready answers 503."""
    return OVERLOADED if error.status == 503 and error.code in _BUSY else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(status_of(error), "invalid_request_error")
    details = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error), **details},
        "request_id": error.headers.get("X-Request-Id"),
    }


def _message(error: ApiError) -> str:
    """Agents shorten their conversation where a message begins with "prompt is too long"."""
    if error.code != "context_length_exceeded":
        return error.message
    prompt, context = error.more.get("n_prompt_tokens"), error.more.get("n_ctx")
    numbers = "" if None in (prompt, context) else f": {prompt} tokens > {context} maximum"
    return f"prompt is too long{numbers}. {error.message}"


ANTHROPIC_ERRORS = ErrorForm(
    error_body,
    status_of,
    name="AnthropicError",
    schema=_SCHEMA,
    request_id="request-id",
    statuses=(OVERLOADED,),
)
