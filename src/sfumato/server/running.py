"""Requests of one HTTP call while the engine works on them: events from its thread to the loop.

Whoever starts requests here cancels them when the client has gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from sfumato.engine import Commit, Draft, Engine, Event, Failed, Finished, Handle, Request
from sfumato.server.errors import CLIENT_GONE, ApiError, bad_request, from_failed, from_refusal

MOST_DRAFTS = 4  # of a request, waiting for a client that reads slowly; the newest are kept


@dataclass
class Outcome:
    """All that came of one request."""

    commits: list[Commit] = field(default_factory=list)
    end: Finished | None = None

    @property
    def finished(self) -> Finished:
        assert self.end
        return self.end


class Running:
    """Some requests' events, in the order in which they come."""

    def __init__(self, count: int) -> None:
        self.open = set(range(count))  # those whose terminal event has not been taken yet
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._handles: list[Handle] = []

    @property
    def id(self) -> str:
        """The first request's, under which the audit log has it."""
        return self._handles[0].id

    async def next(self, patience_s: float | None = None) -> tuple[int, Event] | None:
        """The next event with its request's number; None where none came in time."""
        try:
            async with asyncio.timeout(patience_s):
                await self._arrived.wait()
        except TimeoutError:
            return None
        number, event = self._waiting.popleft()
        if not self._waiting:
            self._arrived.clear()
        if isinstance(event, Finished | Failed):
            self.open.discard(number)
        return number, event

    def cancel(self) -> None:
        """Ends what has not ended."""
        for number, handle in enumerate(self._handles):
            if number in self.open:
                handle.cancel()

    def submit(self, engine: Engine, requests: Sequence[Request]) -> None:
        """In a thread of its own: prompts become tokens here. Raises what the engine raises."""
        for number, request in enumerate(requests):
            self._handles.append(engine.submit(request, self._sink(number)))

    def _sink(self, number: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            try:
                self._loop.call_soon_threadsafe(self._put, number, event)
            except RuntimeError:  # the loop is closed: the server has stopped
                return

        return deliver

    def _put(self, number: int, event: Event) -> None:
        if isinstance(event, Draft):
            drafts = [
                at
                for at, (of, before) in enumerate(self._waiting)
                if of == number and isinstance(before, Draft)
            ]
            if len(drafts) == MOST_DRAFTS:
                del self._waiting[drafts[0]]
        self._waiting.append((number, event))
        self._arrived.set()


async def start(engine: Engine, requests: Sequence[Request]) -> Running:
    """Raises ApiError where the engine refuses one of them; then none of them runs."""
    most = engine.config.slots + engine.config.queue
    if len(requests) > most:
        raise bad_request(
            f"n: {len(requests)} replies are asked for, and {most} at most fit the slots and the "
            "queue; ask for fewer, or raise --slots or --queue",
            "n",
        )
    running = Running(len(requests))
    try:
        await run_in_threadpool(running.submit, engine, requests)
    except Exception as error:
        running.cancel()
        raise from_refusal(error, requests[0]) from None
    except BaseException:
        running.cancel()
        raise
    return running


def headers_of(running: Running) -> dict[str, str]:
    """Those by which an answer can be found in the audit log."""
    return {"X-Request-Id": running.id}


async def outcomes(http: HttpRequest, running: Running) -> list[Outcome]:
    """Waits for all of them. Raises ApiError where one fails or the client goes away."""
    work = asyncio.create_task(_collect(running))
    gone = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(CLIENT_GONE, "the client has gone")
        return work.result()
    finally:
        running.cancel()
        work.cancel()
        gone.cancel()


async def _collect(running: Running) -> list[Outcome]:
    found = [Outcome() for _ in running.open]
    while running.open:
        taken = await running.next()
        assert taken
        number, event = taken
        if isinstance(event, Failed):
            failure = from_failed(event)
            failure.headers |= headers_of(running)
            raise failure
        if isinstance(event, Finished):
            found[number].end = event
        elif isinstance(event, Commit):
            found[number].commits.append(event)
    return found


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
