"""How many bytes of large bodies are held at a time, and how many bodies are read by a thread.

A large body holds its bytes of the budget from its first byte until its request is made. A body for
which there is no budget is not received: its connection waits. Small bodies need no budget, since a
connection buffers as much in any case. Every wait is bounded, and ends in a 503. Knows no JSON.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sfumato.server.http.errors import RETRY_LATER, ApiError

SMALL = 64 * 2**10  # bytes; what a connection buffers in any case
WAIT_S = 10.0  # for bodies, and again for a thread
CHECK_S = 0.25
GRACE_S = 2.0  # that a body may take to arrive although others wait
LEAST_PACE = 2**20  # bytes a second; a slower body is ended where others wait


class Arrival:
    """A body that is being received."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.limit = limit
        self._began = asyncio.get_running_loop().time()
        self.nbytes = 0  # so far
        self.ended_as_slow = False  # ended because others waited

    def end_if_slow(self, now: float) -> None:
        """Ends the upload where it is slow."""
        age = now - self._began
        slow = age > GRACE_S and self.nbytes < LEAST_PACE * age
        if slow and not self.ended_as_slow and not self.limit.expired():
            self.ended_as_slow = True
            self.limit.reschedule(now)


@asynccontextmanager
async def arriving(seconds: float, budget: Budget | None = None) -> AsyncIterator[Arrival]:
    """Within, a body is received; budget: of which it holds its bytes, so that a slow one ends
    where others wait. Raises ApiError where it takes too long."""
    arrival = Arrival(asyncio.timeout(seconds))
    arrivals = set[Arrival]() if budget is None else budget.arrivals
    arrivals.add(arrival)
    try:
        async with arrival.limit:
            yield arrival
    except TimeoutError:
        message = (
            f"the body arrived at less than {LEAST_PACE:,} bytes a second while others waited; "
            "send it again later"
            if arrival.ended_as_slow
            else f"the body did not arrive within {seconds:g} seconds; send it faster, or less"
        )
        headers = {"Connection": "close"}
        raise ApiError(408, message, code="body_timeout", headers=headers) from None
    finally:
        arrivals.discard(arrival)


class Budget:
    """What bodies hold at a time: bytes, or threads that decode them. First come, first served."""

    def __init__(self, amount: int, most_waiting: float = math.inf) -> None:
        self._free, self._most_waiting = amount, most_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.arrivals: set[Arrival] = set()

    @asynccontextmanager
    async def hold(self, amount: int = 1) -> AsyncIterator[None]:
        """Within, so much is held. Raises ApiError after a long wait."""
        await self._acquire(amount)
        try:
            yield
        finally:
            self._free += amount
            self._grant()

    @asynccontextmanager
    async def lend(self, amount: int = 1) -> AsyncIterator[None]:
        """Within, so much of what is held is others'. Raises ApiError after a long wait for it."""
        self._free += amount
        self._grant()
        try:
            yield
        finally:
            try:
                await self._acquire(amount)
            except BaseException:
                self._free -= amount  # `hold` gives it back
                raise

    async def _acquire(self, amount: int) -> None:
        if not self._waiting and amount <= self._free:
            self._free -= amount
            return
        if len(self._waiting) >= self._most_waiting:
            raise overloaded()
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append((amount, granted))
        until = loop.time() + WAIT_S
        try:
            while not granted.done():
                if loop.time() > until:
                    raise overloaded()
                for arrival in self.arrivals:
                    arrival.end_if_slow(loop.time())
                await asyncio.wait([granted], timeout=CHECK_S)
        except BaseException:
            if granted.done():
                self._free += amount
            else:
                self._waiting.remove((amount, granted))
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            amount, granted = self._waiting.popleft()
            self._free -= amount
            granted.set_result(None)


class Admission:
    """The limits of one server. Small bodies, which nearly all are, never wait for large ones."""

    def __init__(self, max_body: int) -> None:
        self.max_body = max_body
        self.bodies = Budget(2 * max_body, most_waiting=16)
        self.small = Budget(2)
        # One at a time is read: its values and texts may take several times its bytes.
        self.large = Budget(1)


def overloaded(why: str = "more bodies arrive than this server reads at a time") -> ApiError:
    """The error for a body that may be taken later."""
    return ApiError(
        503,
        f"{why}; send it again later",
        code="bodies_busy",
        headers=RETRY_LATER | {"Connection": "close"},
    )
