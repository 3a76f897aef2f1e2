"""Requests of one HTTP call while the engine works on them: events from its thread to the loop.

Of many requests only some are in the engine at a time; the next one follows when one has ended. The
caller that starts requests cancels them when its client has disconnected. A client may limit how
long a reply is written (`WritingLimit`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from sfumato.engine import (
    Decided,
    DecisionRequest,
    Draft,
    Event,
    Failed,
    Finished,
    Handle,
    QueueFull,
    Request,
    Settled,
    Terminal,
)
from sfumato.engine.any_engine import AnyEngine
from sfumato.engine.errors import REFUSALS
from sfumato.engine.events import RequestFailed, explain
from sfumato.engine.request import AnyRequest
from sfumato.server.http.errors import CLIENT_GONE, ApiError, from_failed, from_refusal
from sfumato.server.http.middleware import OWNER

T = TypeVar("T")
AnyEvent = Event | Decided

# Threads of their own for requests whose grammars are compiled at submission. A compilation takes
# up to a second, as trials have shown that come before. Streams take their frames from the server's
# shared threads, which compilations must not occupy, nor may those that wait.
GRAMMAR_THREADS = 2
MOST_WAITING = 64
"""Requests for these threads; the last of them waits for half a minute at worst."""
_limiter: RunVar[CapacityLimiter] = RunVar("grammar_threads")


def _grammar_threads() -> CapacityLimiter:
    """The threads of the running loop."""
    try:
        return _limiter.get()
    except LookupError:
        made = CapacityLimiter(GRAMMAR_THREADS)
        _limiter.set(made)
        return made


MOST_DRAFTS = 4  # of a request, waiting for a client that reads slowly; the newest are kept
_NOT_BEGUN = Failed("cancelled", "the request was cancelled before it began")

_GONE = Failed("cancelled", "the client has disconnected")

RETRY_S = 0.1  # how often a full queue is tried again, and a deadline looked at


@dataclass
class CollectedReply:
    """The end of one request, and its canvases."""

    settled: list[Settled] = field(default_factory=list)  # where they are wanted
    end: Finished | Decided | None = None

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished)
        return self.end


class InFlight:
    """The requests of one HTTP call, and their events in order of arrival."""

    def __init__(
        self,
        engine: AnyEngine,
        requests: Sequence[AnyRequest],
        writing_s: float | None = None,
    ) -> None:
        """writing_s: of `WritingLimit`."""
        self._engine = engine
        self._requests = requests  # their `since` is set: deadlines count while they wait here
        self._grammars = {
            request.grammar
            for request in requests
            if isinstance(request, Request) and request.grammar is not None
        }
        self._current = 0  # number of the request that was given to the engine last
        self.open = set(range(len(requests)))  # those whose terminal event has not been taken yet
        # As many requests as there are slots wait in the queue, so that no slot is free for long;
        # more would fill the queue that other clients need.
        self._window = 2 * engine.config.slots
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, AnyEvent]] = deque()
        self._arrived, self._moved = asyncio.Event(), asyncio.Event()
        self._handles: list[
            Handle[Any]
        ] = []  # of the first ones; the others are yet to be submitted
        self._feeder: asyncio.Task[None] | None = None
        self._limit = None if writing_s is None else WritingLimit(writing_s, self._cancel)

    @property
    def id(self) -> str:
        """The first request's, under which the audit log has it."""
        return self._requests[0].id

    async def next(self, patience_s: float | None = None) -> tuple[int, AnyEvent] | None:
        """The next event with its request's number; None where none came in time."""
        try:
            async with asyncio.timeout(patience_s):
                await self._arrived.wait()
        except TimeoutError:
            return None
        number, event = self._waiting.popleft()
        if not self._waiting:
            self._arrived.clear()
        if isinstance(event, Terminal):
            self.open.discard(number)
        return number, event

    @property
    def is_going(self) -> bool:
        """Whether it has events to come, and is not cancelled."""
        return bool(self.open) and not self._cancelled

    def cancel(self) -> None:
        """Cancels the requests that have not ended."""
        self._cancelled = True
        self._moved.set()
        for number in self.open:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Cancels one request; the engine may have it before its handle is here."""
        if number < len(self._handles):
            self._handles[number].cancel()

    async def begin(self, http: HttpRequest) -> InFlight:
        """Submits as many requests as the queue takes now, and the others later; returns itself.
        Where the engine raises for one of them, ends all and raises ApiError; for a full queue only
        with the first. Raises ApiError too where the client disconnects, or their time is over,
        while their grammar is tried."""
        try:
            if self._grammars:
                with self._engine.refusals(self._requests[0]):
                    if _grammar_threads().statistics().tasks_waiting >= MOST_WAITING:
                        raise QueueFull(
                            f"{MOST_WAITING} requests with a schema or a grammar wait to be "
                            "submitted already, which is the limit; try again later"
                        )
                    await self._try_grammars(http)
            await self._in_thread(self._submit)
        except BaseException as error:
            self.cancel()
            ending = Failed(*explain(error)) if isinstance(error, Exception) else _NOT_BEGUN
            self._drop(error.failed if isinstance(error, RequestFailed) else ending, error)
            if isinstance(error, RequestFailed):
                raise from_failed(error.failed) from None
            if isinstance(error, Exception):
                raise from_refusal(error, self._requests[0]) from None
            raise
        if len(self._handles) < len(self._requests):
            self._feeder = asyncio.create_task(self._feed())
        return self

    async def _try_grammars(self, http: HttpRequest) -> None:
        """Waits until each grammar has been tried. Raises RequestFailed when the client
        disconnects, or when the requests' time is over."""
        leaving = asyncio.create_task(disconnect(http))
        # Clients take turns: the holder of the key, or else the address.
        client: str = http.scope.get(OWNER, "") or (http.client.host if http.client else "")
        try:
            for source in self._grammars:
                begin = partial(self._engine.try_grammar, source, client)
                trial: asyncio.Future[Any] = asyncio.wrap_future(await run_in_threadpool(begin))
                try:
                    while not trial.done():
                        await asyncio.wait(
                            {trial, leaving}, timeout=RETRY_S, return_when=asyncio.FIRST_COMPLETED
                        )
                        if leaving.done():
                            raise RequestFailed(_GONE)
                        if late := self._engine.late(self._requests[0]):
                            raise RequestFailed(Failed("timeout", late))
                    trial.result()
                finally:
                    trial.cancel()
        finally:
            leaving.cancel()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        limiter = _grammar_threads() if self._grammars else None
        return await to_thread.run_sync(work, limiter=limiter)

    def _submit(self) -> None:
        """In a thread. Checks one reply of each prompt: only seeds differ."""
        first, *others = self._requests
        if isinstance(first, DecisionRequest):
            self._add(self._engine.decide(first, self._sink(0)))
            return
        assert isinstance(first, Request)
        checked = {id(first.made)}
        for number, request in enumerate(others, 1):
            if isinstance(request, Request) and id(request.made) not in checked:
                checked.add(id(request.made))
                self._current = number
                self._engine.check(request)
        self._current = 0
        self._add(self._engine.submit(first, self._sink(0)))
        while len(self._handles) < min(self._window, len(self._requests)) and self._offer():
            pass

    def _offer(self) -> bool:
        """Submits the next one; False where the queue is full."""
        self._current = number = len(self._handles)
        request = self._requests[number]
        assert isinstance(request, Request)  # a decision comes alone
        handle = self._engine.offer(request, self._sink(number))
        if handle is not None:
            self._add(handle)
        return handle is not None

    def _add(self, handle: Handle[Any]) -> None:
        self._handles.append(handle)
        is_late = self._limit is not None and len(self._handles) - 1 in self._limit.over
        if self._cancelled or is_late:  # in the meantime
            handle.cancel()

    async def _feed(self) -> None:
        """Submits the remaining requests one by one, as the queue accepts them. Ends those that it
        never accepted."""
        ending, cause = _NOT_BEGUN, None
        try:
            while len(self._handles) < len(self._requests) and not self._cancelled:
                if late := self._engine.late(self._requests[0]):
                    ending = Failed("timeout", late)
                    break
                self._moved.clear()
                given = sum(handle.terminal is None for handle in self._handles)
                if given < self._window and await self._in_thread(self._offer):
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._moved.wait()
        except Exception as error:
            ending, cause = Failed(*explain(error)), error
        finally:
            for number in range(len(self._handles), len(self._requests)):
                self._put(number, ending)
            self._drop(ending, cause)

    def _drop(self, ending: Failed, cause: BaseException | None) -> None:
        """Reports the end of requests that the engine does not have; the engine itself has
        reported the one that it refused."""
        refused = self._current if isinstance(cause, REFUSALS) else None
        for number in range(len(self._handles), len(self._requests)):
            if number != refused:
                self._engine.drop(self._requests[number], ending)

    def _sink(self, number: int) -> Callable[[AnyEvent], None]:
        def deliver(event: AnyEvent) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._put, number, event)

        return deliver

    def _put(self, number: int, event: AnyEvent) -> None:
        if self._limit is not None:
            event = self._limit.watched(number, event)
        if isinstance(event, Draft):
            drafts = [
                at
                for at, (of, before) in enumerate(self._waiting)
                if of == number and isinstance(before, Draft)
            ]
            if len(drafts) == MOST_DRAFTS:
                del self._waiting[drafts[0]]
        elif isinstance(event, Terminal):
            self._moved.set()
        self._waiting.append((number, event))
        self._arrived.set()


def headers_of(running: InFlight, name: str | None = None) -> dict[str, str]:
    """Headers that name the answer's line of the audit log. name: a dialect's own such header."""
    return dict.fromkeys(("X-Request-Id", *(() if name is None else (name,))), running.id)


async def collect(
    http: HttpRequest, running: InFlight, settled: bool = False
) -> list[CollectedReply]:
    """Waits for all replies. settled: whether to keep the settled canvases, which hold tensors.
    Raises ApiError where a request fails or the client disconnects."""
    work = asyncio.create_task(_collect_all(running, settled))
    disconnected = asyncio.create_task(disconnect(http))
    try:
        await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(CLIENT_GONE, "the client has disconnected")
        return work.result()
    finally:
        running.cancel()
        work.cancel()
        disconnected.cancel()


async def _collect_all(running: InFlight, settled: bool) -> list[CollectedReply]:
    replies = [CollectedReply() for _ in running.open]
    while running.open:
        taken = await running.next()
        assert taken
        number, event = taken
        if isinstance(event, Failed):
            failure = from_failed(event)
            failure.headers |= headers_of(running)
            raise failure
        if isinstance(event, Finished | Decided):
            replies[number].end = event
        elif isinstance(event, Settled) and settled:
            replies[number].settled.append(event)
    return replies


async def disconnect(http: HttpRequest) -> None:
    """Ends when the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


class WritingLimit:
    """Limits the time of all replies to one HTTP request. As in llama-server, the time counts from
    a reply's first text, and a reply without a line break goes on. Used in the event loop alone."""

    def __init__(self, seconds: float, cancel: Callable[[int], None]) -> None:
        """cancel: called with the number of a reply whose time is over."""
        self._seconds, self._cancel = seconds, cancel
        self._loop = asyncio.get_running_loop()
        self._begun: dict[int, float] = {}  # when a reply's first canvas settled, by the loop
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.over: set[int] = set()  # numbers of replies whose time is over

    def watched(self, number: int, event: AnyEvent) -> AnyEvent:
        """The event; the end of a reply whose time was over says that the reply was cut."""
        if isinstance(event, Settled):
            begun = self._begun.setdefault(number, self._loop.time())
            if "\n" in event.text and number not in self._timers:
                until = begun + self._seconds
                self._timers[number] = self._loop.call_at(until, self._end, number)
        elif isinstance(event, Finished | Failed):
            if number in self._timers:
                self._timers[number].cancel()
            if number not in self.over or isinstance(event, Failed):
                return event
            if event.reply.stop_reason == "cancelled":
                return replace(event, reply=replace(event.reply, stop_reason="max_tokens"))
        return event

    def _end(self, number: int) -> None:
        self.over.add(number)
        self._cancel(number)
