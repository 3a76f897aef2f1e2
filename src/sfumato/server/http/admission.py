"""How many bytes of large bodies are held at a time, and how many bodies are read by a thread.

A large body holds its share from its first byte until its request is made. Where there is no room
it is not received: the connection stands still. Small ones need no share, since a connection has as
much in its own buffers. Every wait is bounded, and ends in a 503. Knows no JSON.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sfumato.server.http.errors import RETRY_AFTER_S, ApiError

SMALL = 64 * 2**10  # bytes; what a connection buffers in any case
WAIT_S = 10.0  # for room, and again for a thread
TICK_S = 0.25
GRACE_S = 2.0  # that a body may take to arrive, whatever others wait for
PACE = 2**20  # bytes a second, below which a body gives way to those that wait


class Arrival:
    """A body that is being received."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._began = asyncio.get_running_loop().time()
        self.nbytes = 0  # so far
        self.hurried = False  # ended since others waited

    def hurry(self, now: float) -> None:
        """Ends it where it is slow."""
        age = now - self._began
        slow = age > GRACE_S and self.nbytes < PACE * age
        if slow and not self.hurried and not self._limit.expired():
            self.hurried = True
            self._limit.reschedule(now)


@asynccontextmanager
async def arriving(seconds: float) -> AsyncIterator[Arrival]:
    """Within, a body is received. Raises ApiError where it takes too long."""
    arrival: Arrival | None = None
    try:
        async with asyncio.timeout(seconds) as limit:
            arrival = Arrival(limit)
            yield arrival
    except TimeoutError:
        raise _late(seconds, arrival is not None and arrival.hurried) from None


class Turns:
    """Threads that read bodies, first come, first served."""

    def __init__(self, threads: int) -> None:
        self._threads = asyncio.Semaphore(threads)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Within, a thread may work on a body. Raises ApiError where others take too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._threads.acquire()
        except TimeoutError:
            raise _busy() from None
        try:
            yield
        finally:
            self._threads.release()


class Room:
    """Bytes for bodies, first come, first served."""

    def __init__(self, nbytes: int, most_waiting: int) -> None:
        self._free, self._most_waiting = nbytes, most_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._arrivals: set[Arrival] = set()

    @asynccontextmanager
    async def share(self, nbytes: int) -> AsyncIterator[None]:
        """Within, so many bytes are taken. Raises ApiError where there is no room for long."""
        await self._take(nbytes)
        try:
            yield
        finally:
            self._free += nbytes
            self._grant()

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[Arrival]:
        """Within, a body that has a share is received; it must make haste where others wait."""
        async with arriving(seconds) as arrival:
            self._arrivals.add(arrival)
            try:
                yield arrival
            finally:
                self._arrivals.discard(arrival)

    async def _take(self, nbytes: int) -> None:
        if not self._waiting and nbytes <= self._free:
            self._free -= nbytes
            return
        if len(self._waiting) >= self._most_waiting:
            raise _busy()
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append((nbytes, granted))
        until = loop.time() + WAIT_S
        try:
            while not granted.done():
                if loop.time() > until:
                    raise _busy()
                for arrival in self._arrivals:
                    arrival.hurry(loop.time())
                await asyncio.wait([granted], timeout=TICK_S)
        except BaseException:
            if granted.done():
                self._free += nbytes
            else:
                self._waiting.remove((nbytes, granted))
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            nbytes, granted = self._waiting.popleft()
            self._free -= nbytes
            granted.set_result(None)


class Admission:
    """What a server admits. Small bodies, which nearly all are, never wait for large ones."""

    def __init__(self, max_body: int) -> None:
        self.most = max_body
        self.room = Room(2 * max_body, most_waiting=16)
        self.small = Turns(2)
        # One at a time is read: its values and texts may take several times its bytes.
        self.large = Turns(1)


def _busy() -> ApiError:
    return ApiError(
        503,
        "more bodies arrive than this server reads at a time; send it again later",
        code="bodies_busy",
        headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )


def _late(seconds: float, hurried: bool) -> ApiError:
    said = (
        f"the body arrived at less than {PACE:,} bytes a second while others waited; send it again "
        "later"
        if hurried
        else f"the body did not arrive within {seconds:g} seconds; send it faster, or less"
    )
    return ApiError(408, said, code="body_timeout", headers={"Connection": "close"})
