"""Anthropic's bodies, what becomes of their messages and tools, and the API's form of errors.

Messages, content blocks and tools become those of the chat template: tool calls and their results
become what OpenAI's API has, which the text side checks. Content blocks are read one by one where a
conversation is made of them; the bodies hold them as they came. Errors name blocks by their place
in the body. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.refused import Refused
from sfumato.server.chat.call import check_count
from sfumato.server.http.errors import ApiError, ErrorForm, Wording
from sfumato.server.schemas import (
    NAME,
    NULL,
    TEXT,
    Body,
    JsonSchema,
    Objects,
    Only,
    Sampling,
    Schema,
    Texts,
    Unknown,
    closed,
    either,
    list_of,
    without_effect,
)
from sfumato.server.settings import ServerSettings
from sfumato.text.messages import tool_name

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


@without_effect("name strict")
class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


@without_effect("task_budget")
class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Of adaptive thinking: tokens of a thought, as reasoning_effort."
    )
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=512, description="Written to the audit log.")


@without_effect(
    "cache_control context_management diagnostics speed user_profile_id workspace_id",
    mcp_servers=Only([], why=_HOSTED),
)
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


@without_effect(
    "betas inference_geo service_tier",
    container=Only(why=_HOSTED),
    fallbacks=Only([], why="one model is loaded"),
)
class MessagesBody(AnthropicPrompt, Sampling):
    max_tokens: int = Field(
        ge=0, le=MOST_TOKENS, description="Thoughts included; 0: the prompt is only encoded."
    )
    stop_sequences: Texts | None = Field(None, description="The same as stop.")
    metadata: Metadata | None = None


@without_effect("betas")
class CountBody(AnthropicPrompt, Body):
    """A prompt whose tokens are counted."""

    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Accepted and ignored.")


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


_KNOWN = {
    *("name", "description", "input_schema", "strict", "type", "cache_control"),
    # Without an effect here.
    *("input_examples", "eager_input_streaming", "allowed_callers", "defer_loading"),
}
WORDING: Wording = {
    "tools[].function.parameters": "tools[].input_schema",
    **{f"tools[].function.{name}": f"tools[].{name}" for name in ("name", "description", "strict")},
}


def tools_of(given: list[dict[str, Any]] | None, unknown: Unknown) -> list[dict[str, Any]]:
    """Raises Refused."""
    return [_tool(tool, f"tools[{i}]", unknown) for i, tool in enumerate(given or ())]


def _tool(tool: Mapping[str, Any], where: str, unknown: Unknown) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise Refused(
            f"{where}.type",
            "only tools with an input_schema are supported",
            "nothing runs here beside the model",
            code="unsupported",
        )
    unknown.check(tool, _KNOWN, where)
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise Refused(f"{where}.input_schema", "must be a JSON schema object")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": schema}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def choice_of(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Raises Refused."""
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise Refused("tool_choice.name", "is missing", code="missing")
    return {"type": "function", "function": {"name": choice.name}}


BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that an agent makes anew for each request. Within the prompt
it would keep all that follows out of the cache."""
_KEYS = {
    "text": {"text", "citations"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
}
_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_UNSUPPORTED = {
    "image": "images are not supported yet",
    "document": "documents are not supported; send their text",
    "search_result": "search results are not supported; send their text",
}


class Conversation:
    """Messages of the chat template, and where each stands in the body."""

    def __init__(self, unknown: Unknown) -> None:
        self._unknown = unknown
        self.messages: list[dict[str, Any]] = []
        self._places: list[str] = []

    @property
    def names(self) -> dict[str, str]:
        """What the body calls the messages, by the names that they have for the engine."""
        names = dict[str, str]()
        for number, place in enumerate(self._places):
            message = f"messages[{number}]"
            names |= {message: place, f"{message}.role": place}
            names[f"{message}.tool_call_id"] = f"{place}.tool_use_id"
        return names

    def texts(self, content: Any, where: str) -> str:
        """A text, or the texts of blocks with an empty line between them. Raises Refused."""
        if isinstance(content, str):
            return content
        blocks = self._blocks(content, where, ("text",))
        texts = [block["text"] for _, block in blocks]
        return "\n\n".join(text for text in texts if not text.startswith(BILLING))

    def read(self, message: Mapping[str, Any], where: str) -> None:
        """Adds a message of the body. Raises Refused."""
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise Refused(f"{where}.role", "must be user, assistant or system")
        self._unknown.check(message, ("role", "content"), where)
        content, where = message.get("content"), f"{where}.content"
        if role == "system":
            self.add({"role": role, "content": self.texts(content, where)}, where)
            return
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = list(self._blocks(content, where, _ROLES[role]))
        if role == "assistant":
            self.add(_of_assistant(blocks), where)
            return
        for here, block in blocks:  # results follow their calls, whatever stands before them
            if block["type"] == "tool_result":
                result = self.texts(block.get("content") or "", f"{here}.content")
                called = {"tool_call_id": block["tool_use_id"], "content": result}
                self.add({"role": "tool", **called}, here)
        parts = [
            {"type": "text", "text": block["text"]}
            for _, block in blocks
            if block["type"] == "text"
        ]
        if parts or not blocks:
            self.add({"role": role, "content": parts}, where)

    def add(self, message: dict[str, Any], place: str) -> None:
        """Turns of one role that follow each other are one turn, as in Anthropic's API."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool":
            self.messages.append(message)
            self._places.append(place)
            return
        if message["role"] == "system":
            last["content"] += "\n\n"
        last["content"] += message["content"]
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]

    def _blocks(
        self, content: Any, where: str, kinds: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Blocks of those kinds, each with its place. Raises Refused."""
        if not isinstance(content, list):
            raise Refused(where, "must be text or a list of content blocks")
        for number, block in enumerate(content):
            here = f"{where}[{number}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if isinstance(kind, str) and kind in _UNSUPPORTED:
                raise Refused(here, _UNSUPPORTED[kind], code="unsupported")
            if not isinstance(kind, str) or kind not in kinds:
                raise Refused(f"{here}.type", f"must be {' or '.join(kinds)}")
            self._unknown.check(block, _KEYS[kind] | {"type", "cache_control"}, here)
            _check_texts(block, kind, here)
            yield here, block


def conversation(body: AnthropicPrompt, settings: ServerSettings, unknown: Unknown) -> Conversation:
    """Raises Refused."""
    check_count(body.messages, settings)
    made = Conversation(unknown)
    if system := made.texts(body.system or "", "system"):
        made.add({"role": "system", "content": system}, "system")
    for number, message in enumerate(body.messages):
        made.read(message, f"messages[{number}]")
    for message in made.messages:  # one text is the same prompt as in every other API
        if isinstance(message["content"], list) and len(message["content"]) < 2:
            message["content"] = "".join(part["text"] for part in message["content"])
    return made


def _check_texts(block: Mapping[str, Any], kind: str, where: str) -> None:
    """Raises Refused."""
    texts = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_use": ("id", "name"),
        "tool_result": ("tool_use_id",),
    }
    for name in texts.get(kind, ()):
        if not isinstance(block.get(name), str):
            raise Refused(f"{where}.{name}", "must be text")
    if kind != "tool_use":
        return
    if not isinstance(block.get("input"), Mapping):
        raise Refused(f"{where}.input", "must be an object")
    tool_name(block["name"], f"{where}.name")


def _of_assistant(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Thoughts are left out: past ones never go back to the model."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block["text"] for _, block in blocks if block["type"] == "text"),
    }
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        for _, block in blocks
        if block["type"] == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})
