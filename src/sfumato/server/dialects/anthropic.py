"""Anthropic's messages: POST /v1/messages becomes a request, and its reply one message or the
events of a stream. A prompt's tokens are counted, and the model is shown.

Messages, content blocks and tools become those of the chat template: tool calls and their results
become what OpenAI's API has, which the text side checks. Content blocks are read one by one where a
conversation is made of them; the bodies hold them as they came. Errors name blocks by their place
in the body.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from sfumato.api import Reply
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Account, Finished, Request
from sfumato.media.part import PictureSource
from sfumato.options.limits import MOST_TOKENS
from sfumato.refused import Refused
from sfumato.server.chat.call import ChatCall, Thinking, check_count, requests_of
from sfumato.server.chat.deltas import DeltaRenderer, Entry
from sfumato.server.chat.objects import iso, written_at
from sfumato.server.chat.pictures import message_part, of_base64
from sfumato.server.http.errors import ApiError, ErrorForm, Wording
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Dialect, Frame, Post, Wire, named_event
from sfumato.server.schemas import (
    NAME,
    NULL,
    TEXT,
    Body,
    JsonSchema,
    ModelName,
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
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.calls import ToolCall
from sfumato.text.messages import tool_name

_ANY: Schema = {}
_CACHED = {"cache_control": _ANY}
_NAME: Schema = {"type": "string", "pattern": NAME}


def _block(name: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": name}, **required}, optional)


_TEXT = _block("text", {"text": TEXT}, _CACHED | {"citations": _ANY})
_TEXTS = either(TEXT, list_of(_TEXT))
# The code that reads blocks looks here for the fields that are known, and for those that are texts.
_BLOCKS = {
    "text": _TEXT,
    "image": _block("image", {"source": {"type": "object"}}, _CACHED),
    "thinking": _block("thinking", {"thinking": TEXT}, {"signature": _ANY}),
    "redacted_thinking": _block("redacted_thinking", {}, {"data": _ANY}),
    "tool_use": _block(
        "tool_use",
        {"id": TEXT, "name": _NAME, "input": {"type": "object"}},
        _CACHED | {"caller": _ANY, "toolset_name": _ANY},
    ),
    "tool_result": _block(
        "tool_result",
        {"tool_use_id": TEXT},
        _CACHED | {"content": either(_TEXTS, NULL), "is_error": _ANY, "toolset_name": _ANY},
    ),
}
_ROLES = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}

_SYSTEM = either(_TEXTS, NULL)
_MESSAGES = list_of(
    either(
        closed({"role": {"const": "system"}, "content": _TEXTS}),
        *(
            closed(
                {
                    "role": {"const": role},
                    "content": either(
                        TEXT,
                        # A picture needs a model that reads it, and bytes that are one.
                        list_of(either(*(_BLOCKS[kind] for kind in kinds if kind != "image"))),
                    ),
                }
            )
            for role, kinds in _ROLES.items()
            if role != "system"
        ),
    ),
    least=1,
)
_TOOL = closed(
    {"name": _NAME, "input_schema": {"type": "object"}},
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
    model: ModelName = None
    messages: Annotated[Objects, WithJsonSchema(_MESSAGES)] = Field(min_length=1)
    system: Annotated[str | Objects | None, WithJsonSchema(_SYSTEM)] = None
    tools: Annotated[Objects | None, WithJsonSchema(either(list_of(_TOOL), NULL))] = None
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
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

# error.details of a field that is refused, by which clients know that they can go on without it.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
_ERROR = {
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
    schema=_ERROR,
    request_id="request-id",
    statuses=(OVERLOADED,),
)


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
    unknown.check(tool, _TOOL["properties"], where)
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise Refused(f"{where}.input_schema", "must be a JSON schema object")
    given = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {
        "type": "function",
        "function": {"name": tool.get("name"), "parameters": schema, **given},
    }


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
_UNSUPPORTED = {
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
                result = self._result(block.get("content") or "", f"{here}.content")
                called = {"tool_call_id": block["tool_use_id"], "content": result}
                self.add({"role": "tool", **called}, here)
        kept = ("text", "image")
        parts = [_part(block, here) for here, block in blocks if block["type"] in kept]
        if parts or not blocks:
            self.add({"role": role, "content": parts}, where)

    def _result(self, content: Any, where: str) -> str | list[dict[str, Any]]:
        """A tool's text, and its pictures behind it. Raises Refused."""
        if isinstance(content, str):
            return content
        blocks = list(self._blocks(content, where, ("text", "image")))
        text = self.texts([block for _, block in blocks if block["type"] == "text"], where)
        images = [_part(block, here) for here, block in blocks if block["type"] == "image"]
        return [{"type": "text", "text": text}, *images] if images else text

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
            fields = _BLOCKS[kind]["properties"]
            self._unknown.check(block, fields | _CACHED, here)
            for name, schema in fields.items():
                is_text = schema is TEXT or schema is _NAME
                if is_text and not isinstance(block.get(name), str):
                    raise Refused(f"{here}.{name}", "must be text")
            if kind == "tool_use":
                if not isinstance(block.get("input"), Mapping):
                    raise Refused(f"{here}.input", "must be an object")
                tool_name(block["name"], f"{here}.name")
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
        parts = message["content"]
        if isinstance(parts, list) and len(parts) < 2 and all("text" in part for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
    return made


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block of text or an image as a part of a message. Raises Refused."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source, where = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        raise Refused(f"{where}.type", "must be base64 or url; no files are kept here")
    if kind == "base64":
        return message_part(of_base64(source.get("data"), f"{where}.data"))
    if not isinstance(source.get("url"), str):
        raise Refused(f"{where}.url", "must be a URL")
    return message_part(PictureSource(source["url"], f"{where}.url"))


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


_NO = {"supported": False}
_YES = {"supported": True}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def anthropic_card(service: Service) -> dict[str, Any]:
    """Fields of the loaded model beside OpenAI's."""
    model = service.model
    can_think = {"supported": bool(model.template.markers.thought_open)}
    return {
        "created_at": iso(written_at(service)),
        "lifecycle": "active",
        "max_input_tokens": service.context,
        "max_tokens": service.context,
        "capabilities": {
            "batch": _NO,
            "citations": _NO,
            "code_execution": _NO,
            "context_management": _NO,
            "effort": can_think | dict.fromkeys(_EFFORTS, can_think),
            "image_input": {"supported": model.cut is not None},
            "pdf_input": _NO,
            "server_tools": _NO | {"code_execution": _NO, "web_search": _NO},
            "structured_outputs": _YES,
            "thinking": can_think
            | {
                "types": {
                    "adaptive": can_think,
                    "between_tools": _YES,
                    "disabled": _YES,
                    "enabled": can_think,
                }
            },
        },
    }


WIRE = Wire("text/event-stream", named_event, keepalive=named_event({"type": "ping"}))


class MessagesRenderer(DeltaRenderer):
    """One message: thinking, text and calls are its blocks."""

    def __init__(self, service: Service, body: MessagesBody, requests: Sequence[Request]) -> None:
        super().__init__(service, requests, body)
        (self._request,) = requests
        self._is_cut = body.max_tokens > self._request.max_tokens  # by the context
        self._hides_thought = body.thinking is not None and body.thinking.display == "omitted"
        self._thought = hashlib.sha256()  # of what was thought in the block that is open
        self._open: str | None = None  # the kind of that block
        self._blocks = 0  # begun so far

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        end = collected.finished
        blocks: list[Frame] = []
        if (thought := end.reply.thought) is not None:
            shown = "" if self._hides_thought else thought
            digest = hashlib.sha256(thought.encode())
            blocks.append({"type": "thinking", "thinking": shown, "signature": _signature(digest)})
        if end.reply.text:
            blocks.append({"type": "text", "text": end.reply.text})
        blocks += [_call(call, call.arguments) for call in end.reply.tool_calls]
        message = self._message(blocks, self._usage(end.account), end.reply)
        return message | self.warned(end.reply) | self.verified(end.reply)

    def extra(self, fields: Frame) -> Frame:
        return {"type": next(iter(fields))} | fields

    def begin(self, number: int) -> Iterable[Frame]:
        assert self._request.made
        usage = _usage(len(self._request.made.ids), 0, 0)
        yield {"type": "message_start", "message": self._message([], usage)}
        yield {"type": "ping"}

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        yield from self._enter("thinking", {"thinking": "", "signature": ""})
        self._thought.update(piece.encode())
        if not self._hides_thought:
            yield self._delta({"type": "thinking_delta", "thinking": piece})

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        yield from self._enter("text", {"text": ""})
        yield self._delta({"type": "text_delta", "text": piece})

    def call(
        self, number: int, at: int, call: ToolCall, arguments: Sequence[str]
    ) -> Iterable[Frame]:
        yield from self._close()
        yield self._begin_block(_call(call, {}))
        for piece in arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece})
        self._open = "tool_use"
        yield from self._close()

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": self._stop(end.reply),
            "usage": self._usage(end.account),
            **self.warned(end.reply),
            **self.verified(end.reply),
        }
        yield {"type": "message_stop"}

    def _enter(self, kind: str, empty: Frame) -> Iterator[Frame]:
        """Begins a block of a kind where none is open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._begin_block({"type": kind, **empty})

    def _begin_block(self, block: Frame) -> Frame:
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _close(self) -> Iterator[Frame]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
            self._thought = hashlib.sha256()
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks - 1}
        self._open = None

    def _delta(self, delta: Frame) -> Frame:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _message(self, blocks: list[Frame], usage: Frame, reply: Reply | None = None) -> Frame:
        return {
            "id": f"msg_{self._request.id.removeprefix('req-')}",
            "type": "message",
            "role": "assistant",
            "model": self.service.name,
            "content": blocks,
            **self._stop(reply),
            "usage": usage,
        }

    def _stop(self, reply: Reply | None) -> Frame:
        """Why the reply has ended; null before."""
        stop = reply.stop if reply is not None else None
        return {
            "stop_reason": None if reply is None else self._reason(reply),
            "stop_sequence": stop,
        }

    def _reason(self, reply: Reply) -> str:
        if reply.stop_reason == "max_tokens":
            return "model_context_window_exceeded" if self._is_cut else "max_tokens"
        if reply.tool_calls:
            return "tool_use"
        return "end_turn" if reply.stop is None else "stop_sequence"

    def _usage(self, account: Account) -> Frame:
        usage = _usage(account.prompt_tokens, account.cached_tokens, account.output_tokens)
        return usage | {"output_tokens_details": {"thinking_tokens": account.thought_tokens}}


def _usage(prompt: int, cached: int, written: int) -> Frame:
    """Tokens; those of the prompt that were in the cache count by themselves."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "service_tier": "standard",
    }


def _call(call: ToolCall, arguments: Mapping[str, Any]) -> Frame:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": dict(arguments),
    }


def _signature(digest: Any) -> str:
    """Clients send a thought back with its signature. Nothing is checked by it: past thoughts never
    go back to the model."""
    return base64.b64encode(digest.digest()).decode()


PATH = "/v1/messages"


def parse(service: Service, body: MessagesBody) -> list[Request]:
    """Raises Refused."""
    unknown = body.envelope.unknown
    talk = conversation(body, service.settings, unknown)
    choice, stops = body.tool_choice, [body.stop] if isinstance(body.stop, str) else body.stop
    stops = [*(stops or ()), *(body.stop_sequences or ())]
    call = ChatCall(
        PATH,
        body.model_copy(update={"stop": stops}),
        talk.messages,
        names=talk.names,
        tools=tools_of(body.tools, unknown),
        tool_choice=choice_of(choice),
        is_single=choice is not None and bool(choice.disable_parallel_tool_use),
        forms=_formats(body),
        thinking=_thinking(body),
        limit=body.max_tokens,
        is_most=True,
        user=body.metadata.user_id if body.metadata else None,
    )
    return requests_of(service, call)


def _thinking(body: MessagesBody) -> Thinking:
    """Raises Refused."""
    config = body.thinking
    kind = "disabled" if config is None else config.type
    budget = None
    if config is not None and kind == "enabled":
        budget = config.budget_tokens
        if budget is None:
            raise Refused("thinking.budget_tokens", "is missing", code="missing")
        if 0 < body.max_tokens <= budget:
            raise Refused("thinking.budget_tokens", "must be less than max_tokens")
    effort = body.output_config.effort if body.output_config and kind == "adaptive" else None
    most = budget if body.max_thinking_tokens is None else body.max_thinking_tokens
    return Thinking(effort, kind in ("enabled", "adaptive"), most, "thinking", "thinking")


def _formats(body: MessagesBody) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if body.output_config is not None and body.output_config.format is not None:
        yield schema_source(body.output_config.format.schema_, "output_config.format.schema")
    if body.output_format is not None:
        yield schema_source(body.output_format.schema_, "output_format.schema")


def _count(service: Service, body: CountBody) -> dict[str, Any]:
    """The answer of the other route. Raises Refused."""
    fields = {name: value for name, value in body if name in MessagesBody.model_fields}
    # Of a prompt alone, no limit is looked at.
    counted = MessagesBody.model_construct(**fields | {"max_tokens": 0})
    counted.envelope.pictures = body.envelope.pictures
    (request,) = parse(service, counted)
    assert request.made
    return {"input_tokens": len(request.made.ids)}


MESSAGES = Dialect(
    name="messages",
    path=PATH,
    tag="Anthropic",
    help="The reply to a conversation, as one message or as a stream of events.",
    body_type=MessagesBody,
    parse=parse,
    renderer=MessagesRenderer,
    streams=lambda body: bool(body.stream),
    wire=WIRE,
    errors=ANTHROPIC_ERRORS,
    wording={**WORDING, "stop": "stop_sequences"},
)

COUNT_TOKENS = Post(
    path=f"{PATH}/count_tokens",
    name="count_tokens",
    tag="Anthropic",
    help="The tokens of a prompt, without a reply.",
    body_type=CountBody,
    at_once=_count,
    errors=ANTHROPIC_ERRORS,
    wording=MESSAGES.wording,
)
