"""A reply as one of Anthropic's messages, and as the events of its streams."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, Settled
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.openai_tools import ignored_tools, unknown_calls
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.unsent import Unsent
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import Wire, named_event
from sfumato.server.schemas.anthropic import MessagesBody
from sfumato.server.service import Service
from sfumato.text.reply import ToolCall

_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}

WIRE = Wire("text/event-stream", named_event, keepalive=named_event({"type": "ping"}))


class MessagesRenderer(Renderer):
    """One message: thinking, text and calls are its blocks."""

    def __init__(self, service: Service, body: MessagesBody, requests: Sequence[Request]) -> None:
        (request,) = requests
        self._service, self._request = service, request
        self._notes = [*openai_objects.notes(body), *ignored_tools(request.tools, service.model)]
        self._is_cut = body.max_tokens > request.max_tokens  # by the context
        self._hides_thought = body.thinking is not None and body.thinking.display == "omitted"
        self._unsent = Unsent()
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
        return self._message(blocks, self._usage(end.account), end.reply) | self._warned(end.reply)

    def extra(self, fields: Frame) -> Frame:
        return {"type": next(iter(fields))} | fields

    def begin(self, number: int) -> Iterable[Frame]:
        assert self._request.made
        usage = _usage(len(self._request.made.ids), 0, 0)
        yield {"type": "message_start", "message": self._message([], usage)}
        yield {"type": "ping"}

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield from self._frames(*self._unsent.of(settled))

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._frames(*self._unsent.rest(end.reply))
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": self._stop(end.reply),
            "usage": self._usage(end.account),
            **self._warned(end.reply),
        }
        yield {"type": "message_stop"}

    def _frames(self, thought: str, text: str, calls: Sequence[ToolCall]) -> Iterator[Frame]:
        """The events of what a reply has grown by."""
        if thought:
            yield from self._enter("thinking", {"thinking": "", "signature": ""})
            self._thought.update(thought.encode())
            if not self._hides_thought:
                yield from self._deltas("thinking", thought)
        if text:
            yield from self._enter("text", {"text": ""})
            yield from self._deltas("text", text)
        for call in calls:
            yield from self._close()
            yield self._begin_block(_call(call, {}))
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            for piece in pieces(arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": piece})
            self._open = "tool_use"
            yield from self._close()

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

    def _deltas(self, kind: str, text: str) -> Iterator[Frame]:
        for piece in pieces(text):
            yield self._delta({"type": _DELTAS[kind], kind: piece})

    def _delta(self, delta: Frame) -> Frame:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _message(self, blocks: list[Frame], usage: Frame, reply: Reply | None = None) -> Frame:
        return {
            "id": f"msg_{self._request.id.removeprefix('req-')}",
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
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

    def _warned(self, reply: Reply) -> Frame:
        calls = unknown_calls(self._request.tools, reply)
        lines = [*self._notes, *warnings(self._service.model.embedded, reply), *calls]
        return {"warnings": lines} if lines else {}


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
