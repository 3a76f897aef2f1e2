"""Threads of their own for requests whose grammars are compiled at submission.

A compilation takes up to a second, as trials have shown that come before.  Streams take their
frames from the server's shared threads, which compilations must not occupy, nor may those that
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from sfumato.engine import QueueFull

T = TypeVar("T")

THREADS = 2
MOST_WAITING = 64
"""Requests; the last of them waits for half a minute at worst."""
_limiter: RunVar[CapacityLimiter] = RunVar("grammar_threads")


def _threads() -> CapacityLimiter:
    """The threads of the running loop."""
    try:
        return _limiter.get()
    except LookupError:
        made = CapacityLimiter(THREADS)
        _limiter.set(made)
        return made


def check_room() -> None:
    """Raises QueueFull where too many requests wait for these threads."""
    if _threads().statistics().tasks_waiting >= MOST_WAITING:
        raise QueueFull(
            f"{MOST_WAITING} requests with a schema or a grammar wait to be submitted already, "
            "which is the limit; try again later"
        )


async def run(work: Callable[[], T]) -> T:
    """Calls `work` in one of these threads, when one is free."""
    return await to_thread.run_sync(work, limiter=_threads())
