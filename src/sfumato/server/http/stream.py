"""A reply as a stream: frames of a `Renderer`, drafts, keep-alives, and errors on the way.

What frames look like is the renderer's business, and how they are written the `Wire`'s. The web
page is sent more of a canvas: drafts on the way, and what the canvas settled to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from torch import Tensor

from sfumato.engine import Account, Draft, Event, Failed, Finished, Settled
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.errors import ApiError, from_failed, internal
from sfumato.server.http.inflight import InFlight, headers_of
from sfumato.server.http.security import Receive, Scope, Send
from sfumato.server.service import Service

log = logging.getLogger(__name__)


def response(
    service: Service, running: InFlight, renderer: Renderer, dialect: Dialect[Any]
) -> StreamingResponse:
    """The stream of `running`, which is cancelled when the client goes away."""
    frames = _Frames(service, renderer, dialect)
    return _Stream(running, _texts(service, running, frames), renderer, dialect)


class _Stream(StreamingResponse):
    """Cancels what runs when it ends. Its generator cannot: a client that goes away early, or in
    the middle of a frame, leaves it not begun, or waiting to be collected."""

    def __init__(
        self,
        running: InFlight,
        texts: AsyncIterator[str],
        renderer: Renderer,
        dialect: Dialect[Any],
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        headers |= headers_of(running, dialect.errors.request_id)
        super().__init__(texts, media_type=dialect.wire.media_type, headers=headers)
        self._running, self._renderer = running, renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._running.open:
                self._running.cancel()
                self._renderer.left()


async def _texts(service: Service, running: InFlight, frames: _Frames) -> AsyncIterator[str]:
    """What is written on the connection."""
    wire = frames.wire
    try:
        for text in await run_in_threadpool(frames.first, sorted(running.open)):
            yield text
        sent = time.monotonic()
        while running.open:
            # Events without a frame, as of a thought that is not shown, leave a stream silent too.
            silent = time.monotonic() - sent
            patience = max(0.0, service.settings.keepalive_s - silent)
            watches_s = frames.watches_s
            taken = await running.next(min(patience, watches_s or patience))
            if taken is None and watches_s is not None:
                for text in await run_in_threadpool(frames.waiting):
                    yield text
                    sent = time.monotonic()
            if taken is None:
                if time.monotonic() - sent >= service.settings.keepalive_s:
                    if wire.keepalive:
                        yield wire.keepalive
                    sent = time.monotonic()
                continue
            for text in await run_in_threadpool(frames.of, *taken):
                yield text
                sent = time.monotonic()
            if isinstance(taken[1], Failed):
                break
        else:
            for text in frames.last():
                yield text
    except Exception:
        log.exception("a stream failed")
        for text in frames.error(internal()):
            yield text
    if wire.end:
        yield wire.end


class _Frames:
    """The frames of a stream as texts, event by event."""

    def __init__(self, service: Service, renderer: Renderer, dialect: Dialect[Any]) -> None:
        self._service, self._renderer, self._dialect = service, renderer, dialect
        self.wire = dialect.wire
        self._accounts: dict[int, Account] = {}
        self._steps: dict[int, int] = {}  # of the replies whose drafts are sent: the latest one

    def first(self, numbers: Iterable[int]) -> list[str]:
        """Frames before all events; in a thread: they may repeat what a large body asks for."""
        begun = (frame for number in numbers for frame in self._renderer.begin(number))
        return list(self._encoded(begun))

    @property
    def watches_s(self) -> float | None:
        return self._renderer.watches_s

    def waiting(self) -> list[str]:
        """Frames that come without an event."""
        return list(self._encoded(self._renderer.waiting()))

    def of(self, number: int, event: Event) -> list[str]:
        """In a thread: a large canvas with log probabilities takes tens of milliseconds."""
        return list(self._encoded(self._of(number, event)))

    def last(self) -> Iterator[str]:
        """Frames after all replies."""
        accounts = [self._accounts[number] for number in sorted(self._accounts)]
        return self._encoded(self._renderer.closed(accounts))

    def error(self, error: ApiError) -> Iterator[str]:
        """Frames that end the stream early."""
        return self._encoded(self._failed(error))

    def _encoded(self, frames: Iterable[Frame]) -> Iterator[str]:
        return map(self.wire.encode, frames)

    def _failed(self, error: ApiError) -> Iterable[Frame]:
        error.rename(self._dialect.wording)
        return self._renderer.failed(error, self._dialect.errors.body(error))

    def _of(self, number: int, event: Event) -> Iterable[Frame]:
        renderer = self._renderer
        if isinstance(event, Draft):
            self._steps[number] = event.step
            yield renderer.extra({"draft": draft_frame(self._service, number, event)})
        elif isinstance(event, Settled):
            if number in self._steps:
                settled = settled_frame(self._service, number, event, self._steps[number])
                yield renderer.extra({"settled": settled})
            yield from renderer.settled(number, event)
        elif isinstance(event, Failed):
            yield from self._failed(from_failed(event))
        elif isinstance(event, Finished):
            self._accounts[number] = event.account
            yield from renderer.finished(number, event)


def draft_frame(service: Service, number: int, draft: Draft) -> dict[str, Any]:
    """One step. Probabilities and entropies (nats) are rounded: they are for display."""
    ids = draft.token_ids.tolist()
    top_ids, top_probs = draft.top_ids.tolist(), _rounded(draft.top_probs)
    noise = {} if draft.noise is None else {"noise": service.token_texts(draft.noise.tolist())}
    pinned = {} if draft.pinned is None else {"pinned": draft.pinned.tolist()}
    return {
        "index": number,
        "canvas": draft.canvas,
        "step": draft.step,
        "max_steps": draft.max_steps,
        "token_ids": ids,
        "tokens": service.token_texts(ids),
        "text": draft.text,
        "entropy": _rounded(draft.entropy),
        "accepted": draft.accepted.tolist(),
        "top": [
            list(zip(tokens, probs, strict=True))
            for tokens, probs in zip(top_ids, top_probs, strict=True)
        ],
        **noise,
        **pinned,
    }


def _rounded(values: Tensor) -> Any:
    """Lists of the values, to four digits."""
    return values.double().mul(1e4).round().div(1e4).tolist()


def settled_frame(service: Service, number: int, settled: Settled, steps: int) -> dict[str, Any]:
    return {
        "index": number,
        "canvas": settled.canvas,
        "convergence": settled.convergence,
        "token_ids": settled.token_ids,
        "tokens": service.token_texts(settled.token_ids),
        "steps": steps,
    }
