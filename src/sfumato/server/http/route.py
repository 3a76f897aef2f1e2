"""Routes as values: `Get`, `Post`, and `Dialect`, one HTTP API for replies; how answers are written
(`Wire`); and `reply`, the one function of all POST routes: a body becomes requests, and these a
reply or a stream.

A dialect parses a body into the engine's requests and renders replies and events; all else (bodies,
threads, streams, disconnects, statuses) stands here. A body's class says which fields are honoured,
refused or ignored. A stream has the frames of a `Renderer`, drafts, keep-alives, and errors on the
way; the web page is sent drafts too, and what each canvas settled to. Knows no dialect.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from torch import Tensor

from sfumato.engine import Account, Draft, Failed, Finished, Request, Settled
from sfumato.media.part import PictureSource
from sfumato.server.http import inflight, request_body
from sfumato.server.http.errors import (
    OPENAI_ERRORS,
    ApiError,
    ErrorForm,
    Wording,
    from_failed,
    in_the_words_of,
    internal,
)
from sfumato.server.http.inflight import AnyEvent, CollectedReply, InFlight, headers_of
from sfumato.server.http.middleware import Receive, Scope, Send
from sfumato.server.http.pictures import Unread
from sfumato.server.schemas import Body
from sfumato.server.service import Service

log = logging.getLogger(__name__)


def json_response(
    fields: Mapping[str, Any] | Iterator[Any], headers: Mapping[str, str]
) -> Response:
    """To be called in a thread: tokens with alternatives take long to encode. The items of an
    iterator are made and encoded one by one, so that one reply's objects exist at a time."""
    if isinstance(fields, Iterator):
        text = _value(fields)
    else:
        text = ",".join(f"{json.dumps(name)}:{_value(value)}" for name, value in fields.items())
        text = f"{{{text}}}"
    return Response(text, headers=dict(headers), media_type="application/json")


def _value(value: Any) -> str:
    if isinstance(value, Iterator):
        return f"[{','.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Wire:
    """One way to send frames. An empty text sends nothing."""

    media_type: str
    encode: Callable[[Fields], str]
    keepalive: str = ""  # sent while a stream has no frames for a time
    end: str = ""  # sent after the last frame


# Many clients, httpx's iter_lines among them, end a line at these three also.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def written(frame: Fields) -> str:
    """A frame as JSON in one line, whatever a client takes for the end of a line."""
    text = json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    return text


def line(frame: Fields) -> str:
    """A line of JSON."""
    return written(frame) + "\n"


def event(frame: Fields) -> str:
    """A server-sent event without a name."""
    return f"data: {written(frame)}\n\n"


def named_event(frame: Fields) -> str:
    """A server-sent event that has the name of its frame's type."""
    return f"event: {frame['type']}\n{event(frame)}"


SSE = Wire("text/event-stream", event, keepalive=": waiting\n\n")


B = TypeVar("B", bound=Body)
Parsed = TypeVar("Parsed")
Frame = dict[str, Any]
Answer = Mapping[str, Any] | Iterator[Any]
"""One JSON object, or a list whose items are made and encoded one by one."""


class Renderer(ABC):
    """The replies to one HTTP request, by number: as one body, or as the frames of a stream."""

    keeps_settled = False  # whether `body` needs the settled canvases, which hold tensors

    @abstractmethod
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        """The answer without a stream. An iterator in it becomes a list, and its items are made
        and encoded one by one. Called in a thread."""

    def begin(self, number: int) -> Iterable[Frame]:
        """Before a reply's first event."""
        return ()

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        """A canvas has settled."""
        return ()

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        """A reply has ended: what no frame has yet, and the end."""
        return ()

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        """After all replies."""
        return ()

    def failed(self, error: ApiError, body: Frame) -> Iterable[Frame]:
        """Instead of all that would follow; body: as the dialect's `errors` has it."""
        yield body

    def left(self) -> None:
        """The client of a stream has gone before the end; no frame follows."""
        return

    @property
    def watches_s(self) -> float | None:
        """After how long without an event `waiting` may have frames; None: it has none."""
        return None

    def waiting(self) -> Iterable[Frame]:
        """While there is no event. Called in a thread."""
        return ()

    def extra(self, fields: Frame) -> Frame:
        """A frame for the web page alone: `draft` or `settled`, where a body asks for drafts."""
        return fields


@dataclass(frozen=True, kw_only=True)
class Get:
    """One GET route that reads of the server what there is."""

    path: str
    name: str  # in the API description, as the next two
    tag: str
    help: str
    answer: Callable[[Service], Any]
    shape: Any = dict[str, Any]  # of the answer; None: it is a response
    statuses: tuple[int, ...] = ()  # of errors, beside those of any route
    errors: ErrorForm = OPENAI_ERRORS
    has_head: bool = False
    hidden: bool = False  # from the API description


@dataclass(frozen=True, kw_only=True)
class Post(Generic[B]):
    """One POST route. By itself it answers small questions, for which nothing is generated."""

    name: str  # the route's, in the API description
    path: str
    tag: str  # its heading in the API description
    help: str
    body_type: type[B]
    # The answer to a body that asks for no reply; None where it asks for one. In a thread; raises
    # Refused.
    at_once: Callable[[Service, B], Frame | Response | None] = lambda service, body: None
    errors: ErrorForm = OPENAI_ERRORS
    wording: Wording = field(
        default_factory=dict
    )  # the engine's names of fields, where the body has others
    statuses: tuple[int, ...] = ()  # of errors, beside those of any such route
    aliases: tuple[str, ...] = ()  # further paths, which the API description leaves out
    may_load: bool = True  # whether the model that a body names is loaded for it


@dataclass(frozen=True, kw_only=True)
class Dialect(Post[B]):
    """One POST route that generates, and how it speaks."""

    parse: Callable[[Service, B], list[Request]]  # in a thread; raises Refused
    # The body has lost its lists and longer texts: what a reply needs of them the requests have.
    renderer: Callable[[Service, B, Sequence[Request]], Renderer]
    streams: Callable[[B], bool] = lambda body: False
    wire: Wire = SSE
    # Seconds after its first text at which a reply ends with what it has; None: it goes on.
    writing_s: Callable[[B], float | None] = lambda body: None


def _parsed(post: Post[B], service: Service, body: B) -> Frame | Response | list[Request]:
    """What answers the body at once, or the requests that it asks for. Raises Refused."""
    if (fields := post.at_once(service, body)) is not None:
        return fields
    assert isinstance(post, Dialect)  # others answer every body at once
    return post.parse(service, body)


async def with_pictures(service: Service, body: Body, parsed: Callable[[], Parsed]) -> Parsed:
    """What `parsed` makes of the body, in a thread; again once its pictures are read, if it raises
    Unread."""

    def attempted() -> Parsed | _Lacking:
        # The error would keep the frames in its traceback, and these the pictures.
        try:
            return parsed()
        except Unread as unread:
            return _Lacking(unread.sources)

    made = await run_in_threadpool(attempted)
    if not isinstance(made, _Lacking):
        return made
    assert service.model.cut is not None
    async with body.envelope.apart():
        body.envelope.pictures |= await service.pictures.read(made.sources, service.model.cut)
    return await run_in_threadpool(parsed)


@dataclass(frozen=True)
class _Lacking:
    """Pictures of a body that are not read yet."""

    sources: Sequence[PictureSource]


async def reply(post: Post[B], service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    with in_the_words_of(post.wording):
        async with request_body.read(service, http, post.body_type) as body:
            service = await service.enter(http, body, post.may_load)
            parsed = await with_pictures(service, body, partial(_parsed, post, service, body))
            if isinstance(parsed, Response):
                return parsed
            if isinstance(parsed, dict):
                if isinstance(post, Dialect) and post.streams(body):
                    return Response(post.wire.encode(parsed), media_type=post.wire.media_type)
                return json_response(parsed, {})
        assert isinstance(post, Dialect)
        body = request_body.without_large_fields(body)
        renderer = post.renderer(service, body, parsed)
        parsed = service.asking(parsed, post.streams(body))
        running = await InFlight(service.engine, parsed, post.writing_s(body)).begin(http)
        service.running[running.id] = running
        if post.streams(body):
            return _Stream(service, running, renderer, post)
        replies = await inflight.collect(http, running, renderer.keeps_settled)
        headers = inflight.headers_of(running, post.errors.request_id)
        return await run_in_threadpool(lambda: json_response(renderer.body(replies), headers))


class _Stream(StreamingResponse):
    """The frames of a stream, event by event. Cancels what runs when the stream ends. The generator
    cannot: a client that goes away early, or in the middle of a frame, leaves the generator not
    begun, or waiting to be collected."""

    def __init__(
        self,
        service: Service,
        running: InFlight,
        renderer: Renderer,
        dialect: Dialect[Any],
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        headers |= headers_of(running, dialect.errors.request_id)
        super().__init__(self._texts(), media_type=dialect.wire.media_type, headers=headers)
        self._service, self._running = service, running
        self._renderer, self._dialect = renderer, dialect
        self._accounts: dict[int, Account] = {}
        self._steps: dict[int, int] = {}  # of the replies whose drafts are sent: the latest one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._running.open:
                self._running.cancel()
                self._renderer.left()

    async def _texts(self) -> AsyncIterator[str]:
        """What is written on the connection."""
        wire, renderer, running = self._dialect.wire, self._renderer, self._running
        keepalive_s = self._service.settings.keepalive_s
        try:
            begun = (frame for number in sorted(running.open) for frame in renderer.begin(number))
            for text in await self._encoded(begun):
                yield text
            sent = time.monotonic()
            while running.open:
                # Events without a frame, as of a thought that is not shown, leave a stream silent
                # too.
                patience = max(0.0, keepalive_s - (time.monotonic() - sent))
                watches_s = renderer.watches_s
                taken = await running.next(min(patience, watches_s or patience))
                if taken is not None:
                    frames = self._frames(*taken)
                else:
                    frames = () if watches_s is None else renderer.waiting()
                for text in await self._encoded(frames):
                    yield text
                    sent = time.monotonic()
                if taken is None and time.monotonic() - sent >= keepalive_s:
                    if wire.keepalive:
                        yield wire.keepalive
                    sent = time.monotonic()
                if taken is not None and isinstance(taken[1], Failed):
                    break
            else:
                accounts = [self._accounts[number] for number in sorted(self._accounts)]
                for text in await self._encoded(renderer.closed(accounts)):
                    yield text
        except Exception:
            log.exception("a stream failed")
            for text in await self._encoded(self._failed(internal())):
                yield text
        if wire.end:
            yield wire.end

    async def _encoded(self, frames: Iterable[Frame]) -> list[str]:
        """The frames, which are made in a thread: they may repeat what a large body asks for, and a
        large canvas with log probabilities takes tens of milliseconds."""
        encode = self._dialect.wire.encode
        return await run_in_threadpool(lambda: [encode(frame) for frame in frames])

    def _failed(self, error: ApiError) -> Iterable[Frame]:
        """The frames that end the stream early."""
        error.rename(self._dialect.wording)
        return self._renderer.failed(error, self._dialect.errors.body(error))

    def _frames(self, number: int, event: AnyEvent) -> Iterable[Frame]:
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
    read = settled.verification
    return {
        "index": number,
        "canvas": settled.canvas,
        "convergence": settled.convergence,
        "token_ids": settled.token_ids,
        "tokens": service.token_texts(settled.token_ids),
        "steps": steps,
        **({} if read is None else {"doubted": [at for run in read.doubted_runs for at in run]}),
    }
