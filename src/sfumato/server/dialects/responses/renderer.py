"""A response as one body, and as the events of a stream; it is kept where it is to be.

A thought is an item of its own, text is a message, and each call is an item. Items follow each
other; where text comes behind a call, it is another message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sfumato.engine import Account, Finished, Request
from sfumato.server.chat import objects
from sfumato.server.chat.deltas import DeltaRenderer
from sfumato.server.chat.logprobs import Entry, Logged
from sfumato.server.dialects.responses.body import ResponsesBody
from sfumato.server.dialects.responses.input import new_id
from sfumato.server.dialects.responses.parsing import PATH, WORDING, parse
from sfumato.server.http.dialect import Dialect, Frame
from sfumato.server.http.errors import ApiError
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import SSE, named_event
from sfumato.server.response_store import Item
from sfumato.server.service import Service
from sfumato.text.calls import ToolCall

Event = dict[str, Any]  # its type and fields, without the number in the stream

_ENCRYPTED = "not-needed"
"""The value of `encrypted_content`: no past thought returns to the model, so nothing has to be
encrypted."""


class Output:
    """Takes a reply in parts, and gives the events of each."""

    def __init__(self, logprobs: bool = False, encrypted: bool = False) -> None:
        """logprobs: whether texts come with the log probabilities of their tokens; encrypted:
        whether thoughts have an encrypted content."""
        self.items: list[Item] = []  # the last one may be open
        self._is_open = False
        self._parts: list[str] = []  # of the open item's text
        self._tokens: list[Entry] = []
        self._logprobs, self._encrypted = logprobs, encrypted
        self._held: list[Logged] = []  # white space, which alone makes no message beside calls

    def thought(self, piece: str) -> Iterator[Event]:
        if not self._is("reasoning"):
            yield from self._close()
            yield self._open({"id": new_id("rs"), "type": "reasoning", "summary": []})
            yield self._event("reasoning_summary_part.added", summary_index=0, part=_summary(""))
        self._parts.append(piece)
        yield self._event("reasoning_summary_text.delta", summary_index=0, delta=piece)

    def text(self, piece: str, tokens: Sequence[Entry]) -> Iterator[Event]:
        """Text of the answer, which is made of these tokens."""
        self._held.append((piece, list(tokens)))
        if self._is("message") or piece.strip():
            yield from self._release()

    def call(self, call: ToolCall, arguments: Sequence[str]) -> Iterator[Event]:
        yield from self._close()
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": new_id("call"),
            "name": call.name,
        }
        yield self._open(item)
        for piece in arguments:
            self._parts.append(piece)
            yield self._event("function_call_arguments.delta", delta=piece)
        yield from self._close()

    def end(self, complete: bool) -> Iterator[Event]:
        """The reply has ended. complete: by itself, and at no limit."""
        kinds = {item["type"] for item in self.items}
        if (self._held or complete) and "message" not in kinds and "function_call" not in kinds:
            yield from self._release()
        yield from self._close("completed" if complete else "incomplete")

    def _is(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _release(self) -> Iterator[Event]:
        """The held text, in a message."""
        if not self._is("message"):
            yield from self._close()
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
            yield self._open(item | {"role": "assistant", "content": []})
            yield self._event("content_part.added", content_index=0, part=self._content("", []))
        for text, tokens in self._held:
            self._parts.append(text)
            self._tokens += tokens
            yield self._event(
                "output_text.delta", content_index=0, delta=text, logprobs=list(tokens)
            )
        self._held = []

    def _content(self, text: str, tokens: list[Entry]) -> Item:
        content = {"type": "output_text", "text": text, "annotations": []}
        return content | ({"logprobs": tokens} if self._logprobs else {})

    def _open(self, item: Item) -> Event:
        self.items.append(item)
        self._is_open, self._parts, self._tokens = True, [], []
        at = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": at, "item": dict(item)}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._parts)
        if item["type"] == "message":
            part = self._content(text, self._tokens)
            yield self._event("output_text.done", content_index=0, text=text, logprobs=self._tokens)
            yield self._event("content_part.done", content_index=0, part=part)
            item |= {"content": [part], "status": status}
        elif item["type"] == "reasoning":
            yield self._event("reasoning_summary_text.done", summary_index=0, text=text)
            yield self._event("reasoning_summary_part.done", summary_index=0, part=_summary(text))
            item["summary"] = [_summary(text)]
            if self._encrypted:
                item["encrypted_content"] = _ENCRYPTED
        else:
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
            item |= {"arguments": text, "status": "completed"}
        self._is_open = False
        at = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": at, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **at, **fields}


def _summary(text: str) -> Item:
    return {"type": "summary_text", "text": text}


_STATUS = {"max_tokens": "incomplete", "cancelled": "cancelled"}  # other replies are completed
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # others are errors of the server
_NOT_KEPT = "store: the response was not kept: --response-store has no room, or it was deleted"


class ResponsesRenderer(DeltaRenderer):
    """One reply, as items of an output."""

    def __init__(self, service: Service, body: ResponsesBody, requests: Sequence[Request]) -> None:
        echo = body.echo
        assert echo is not None
        top, progress = (body.top_logprobs or 0) if echo.logprobs else None, body.return_progress
        super().__init__(service, requests, body, alternatives=top, progress=bool(progress))
        self._echo = replace(echo, items=())
        self._items = echo.items  # until they are kept
        body.keep(self._echo)
        self.notes += echo.notes
        # Where calls may stand between texts, items are in the order of a stream.
        self.keeps_settled = echo.logprobs or bool(self.tools)
        self._output = Output(echo.logprobs, echo.encrypted)
        self._number = 0  # of the next event
        self._is_over = False  # whether the response has ended
        self._base = _head(service, requests[0]) | echo.fields

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        end = collected.finished
        for settled in collected.settled:
            _drain(self.settled(0, settled))
        collected.settled.clear()
        _drain(self.rest(0, end.reply))
        _drain(self._output.end(_status(end) == "completed"))
        return self._kept(self._ended(end), begun=False)

    def extra(self, fields: Frame) -> Frame:
        """An event of our own, for those who ask for drafts."""
        (kind,) = fields
        return self._numbered({"type": f"sfumato:{kind}", **fields})

    def begin(self, number: int) -> Iterable[Frame]:
        if self._base["store"]:
            items, self._items = self._items, ()
            if not self.service.responses.add(self._echo.owner, self._base, items):
                self._base = self._base | {"store": False}
                self.notes.append(_NOT_KEPT)
        response = self._base
        yield self._numbered({"type": "response.created", "response": response})
        yield self._numbered({"type": "response.in_progress", "response": response})

    def reported(self, number: int, progress: dict[str, Any]) -> Frame:
        """Reports progress as llama-server does: one more event `response.in_progress`."""
        event = {"type": "response.in_progress", "response": self._base}
        return self._numbered(event | {"prompt_progress": progress})

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        return map(self._numbered, self._output.thought(piece))

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        return map(self._numbered, self._output.text(piece, tokens or ()))

    def call(
        self, number: int, at: int, call: ToolCall, arguments: Sequence[str]
    ) -> Iterable[Frame]:
        return map(self._numbered, self._output.call(call, arguments))

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        self._is_over = True
        is_complete = _status(end) == "completed"
        yield from map(self._numbered, self._output.end(is_complete))
        kind = "response.completed" if is_complete else "response.incomplete"
        response = self._kept(self._ended(end), begun=True)
        yield self._numbered({"type": kind, "response": response})

    def left(self) -> None:
        """What is kept is cancelled, with what has settled."""
        if self._base["store"] and not self._is_over:
            _drain(self._output.end(complete=False))
            over = {"status": "cancelled", "output": self._output.items}
            self.service.responses.update(self._echo.owner, self._base | over)

    def failed(self, error: ApiError, body: Frame) -> Iterable[Frame]:
        self._is_over = True
        _drain(self._output.end(complete=False))
        failure = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        response = self._base | {
            "status": "failed",
            "error": failure,
            "output": self._output.items,
        }
        yield self._numbered(
            {"type": "response.failed", "response": self._kept(response, begun=True)}
        )

    def _ended(self, end: Finished) -> Frame:
        """The response without what is said of its keeping."""
        account, status = end.account, _status(end)
        now = int(time.time())
        return self._base | {
            "status": status,
            "completed_at": now if status == "completed" else None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": self._output.items,
            "usage": _usage(account),
            "timings": objects.timings(account),
            **self.warned(end.reply),
        }

    def _kept(self, response: Frame, begun: bool) -> Frame:
        """The response, kept where it is to be. begun: whether it was kept from its beginning, and
        may have been deleted since."""
        store, owner = self.service.responses, self._echo.owner
        if not response["store"]:
            return response
        if begun:
            is_kept = store.update(owner, response)
        else:
            is_kept = store.add(owner, response, self._items)
        if is_kept:
            return response
        notes = [*response.get("warnings", ()), _NOT_KEPT]
        return response | {"store": False, "warnings": notes}

    def _numbered(self, event: Event) -> Frame:
        self._number += 1
        return {"type": event["type"], "sequence_number": self._number - 1, **event}


def _status(end: Finished) -> str:
    return _STATUS.get(end.reply.stop_reason, "completed")


def _drain(events: Iterable[Event]) -> None:
    for _ in events:
        pass


def _head(service: Service, request: Request) -> Frame:
    """The fields of a response before those that its request decides."""
    return {
        "id": f"resp_{request.id.removeprefix('req-')}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": service.name,
        "output": [],
        "usage": None,
        "service_tier": "default",
    }


def _usage(account: Account) -> dict[str, Any]:
    return {
        "input_tokens": account.prompt_tokens,
        "input_tokens_details": {"cached_tokens": account.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": account.output_tokens,
        "output_tokens_details": {"reasoning_tokens": account.thought_tokens},
        "total_tokens": account.prompt_tokens + account.output_tokens,
    }


RESPONSES = Dialect(
    name="responses",
    path=PATH,
    tag="OpenAI",
    help="A response, as one body or as a stream of events.",
    body_type=ResponsesBody,
    parse=parse,
    renderer=ResponsesRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, encode=named_event),
    wording=WORDING,
)
