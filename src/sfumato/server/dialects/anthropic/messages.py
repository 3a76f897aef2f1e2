"""Anthropic's messages: POST /v1/messages becomes a request, and its reply one message or the
events of a stream. A prompt's tokens are counted, and the model is shown."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sfumato.api import Reply
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Account, Finished, Request
from sfumato.refused import Refused
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    requests_of,
)
from sfumato.server.chat.deltas import DeltaRenderer, Entry
from sfumato.server.chat.objects import written_at
from sfumato.server.dialects.anthropic.body import (
    ANTHROPIC_ERRORS,
    WORDING,
    CountBody,
    MessagesBody,
    choice_of,
    conversation,
    tools_of,
)
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Dialect, Frame, Post, Wire, named_event
from sfumato.server.service import Service
from sfumato.text.calls import ToolCall

_NO = {"supported": False}
_YES = {"supported": True}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def anthropic_card(service: Service) -> dict[str, Any]:
    """Fields beside OpenAI's."""
    model = service.model
    can_think = {"supported": bool(model.template.markers.thought_open)}
    return {
        "type": "model",
        "display_name": service.name,
        "created_at": written_at(service).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": service.context,
        "max_tokens": service.context,
        "capabilities": {
            "batch": _NO,
            "citations": _NO,
            "code_execution": _NO,
            "context_management": _NO,
            "effort": can_think | dict.fromkeys(_EFFORTS, can_think),
            "image_input": _NO,
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
        return self._message(blocks, self._usage(end.account), end.reply) | self.warned(end.reply)

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
