"""Server-sent events: an answer in small pieces, drafts, keep-alives, errors on the way, [DONE].

What the pieces look like is a `Writer`'s business: one for chat, one for text completions.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from torch import Tensor

from sfumato.engine import Account, Draft, Event, Failed, Finished, Settled
from sfumato.server.http.errors import from_failed, internal
from sfumato.server.http.inflight import Running, headers_of
from sfumato.server.http.security import Receive, Scope, Send
from sfumato.server.service import Service

log = logging.getLogger(__name__)

# One word, with the space before it; what is very long, or has no spaces, is cut.
_PIECE = re.compile(r"\s?\S{1,24}|\s{1,24}")
KEEPALIVE = ": waiting\n\n"
DONE = "data: [DONE]\n\n"


class Writer(Protocol):
    """Frames of one HTTP reply's choices, by number."""

    def begin(self, number: int) -> Iterable[dict[str, Any]]: ...

    def commit(self, number: int, commit: Settled) -> Iterable[dict[str, Any]]: ...

    def finish(self, number: int, end: Finished) -> Iterable[dict[str, Any]]: ...

    def close(self, accounts: Sequence[Account]) -> Iterable[dict[str, Any]]: ...

    def extra(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A frame without choices."""
        ...


def pieces(text: str) -> list[str]:
    """The text in small pieces, cut between words; joined they are the text."""
    return _PIECE.findall(text)


def sse(frame: dict[str, Any]) -> str:
    return f"data: {json.dumps(frame, ensure_ascii=False, separators=(',', ':'))}\n\n"


def response(
    service: Service, running: Running, writer: Writer, done: bool = True
) -> StreamingResponse:
    """The stream of `running`, which is cancelled when the client goes away."""
    return _Stream(running, _events(service, running, writer, done))


class _Stream(StreamingResponse):
    """Cancels what runs when it ends. Its generator cannot: a client that goes away early, or in
    the middle of a frame, leaves it not begun, or waiting to be collected."""

    def __init__(self, running: Running, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | headers_of(running)
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _events(
    service: Service, running: Running, writer: Writer, done: bool
) -> AsyncIterator[str]:
    try:
        for number in sorted(running.open):
            for frame in writer.begin(number):
                yield sse(frame)
        frames = _Frames(service, writer)
        while running.open:
            taken = await running.next(service.settings.keepalive_s)
            if taken is None:
                yield KEEPALIVE
                continue
            for text in await run_in_threadpool(frames.encoded, *taken):
                yield text
            if isinstance(taken[1], Failed):
                break
        else:
            for frame in frames.last():
                yield sse(frame)
    except Exception:
        log.exception("a stream failed")
        yield sse(internal().body())
    if done:
        yield DONE


class _Frames:
    """The frames of a stream, event by event."""

    def __init__(self, service: Service, writer: Writer) -> None:
        self._service, self._writer = service, writer
        self._accounts: dict[int, Account] = {}
        self._steps: dict[int, int] = {}

    def encoded(self, number: int, event: Event) -> list[str]:
        """In a thread: a large canvas with log probabilities takes tens of milliseconds."""
        return [sse(frame) for frame in self._of(number, event)]

    def last(self) -> Iterable[dict[str, Any]]:
        """Those after all replies."""
        return self._writer.close([self._accounts[number] for number in sorted(self._accounts)])

    def _of(self, number: int, event: Event) -> Iterable[dict[str, Any]]:
        writer = self._writer
        if isinstance(event, Draft):
            self._steps[number] = event.step
            yield writer.extra({"draft": draft_frame(self._service, number, event)})
        elif isinstance(event, Settled):
            if number in self._steps:
                settled = settled_frame(self._service, number, event, self._steps[number])
                yield writer.extra({"settled": settled})
            yield from writer.commit(number, event)
        elif isinstance(event, Failed):
            yield from_failed(event).body()
        else:
            self._accounts[number] = event.account
            yield from writer.finish(number, event)


def draft_frame(service: Service, number: int, draft: Draft) -> dict[str, Any]:
    """A canvas on the way. Probabilities and entropies (nats) are rounded: they are looked at."""
    ids = draft.token_ids.tolist()
    top_ids, top_probs = draft.top_ids.tolist(), _rounded(draft.top_probs)
    began = {} if draft.noise is None else {"noise": service.pieces(draft.noise.tolist())}
    return {
        "index": number,
        "canvas": draft.canvas,
        "step": draft.step,
        "max_steps": draft.max_steps,
        "token_ids": ids,
        "tokens": service.pieces(ids),
        "text": draft.text,
        "entropy": _rounded(draft.entropy),
        "accepted": draft.accepted.tolist(),
        "top": [
            list(zip(tokens, probs, strict=True))
            for tokens, probs in zip(top_ids, top_probs, strict=True)
        ],
        **began,
    }


def _rounded(values: Tensor) -> Any:
    """Lists of the values, to four digits."""
    return values.double().mul(1e4).round().div(1e4).tolist()


def settled_frame(service: Service, number: int, commit: Settled, steps: int) -> dict[str, Any]:
    return {
        "index": number,
        "canvas": commit.canvas,
        "convergence": commit.convergence,
        "token_ids": commit.token_ids,
        "tokens": service.pieces(commit.token_ids),
        "steps": steps,
    }
