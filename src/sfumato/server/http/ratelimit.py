"""A rate limit for events of one kind, so that no client can fill a log. Knows no log.

Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

BURST = 10  # of one kind at once
EVERY_S = 10.0  # one more each


class RateLimit:
    """A token bucket for each kind of event. The number of kinds must be bounded: each is kept."""

    def __init__(
        self,
        burst: int = BURST,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._kinds: dict[Hashable, tuple[float, float]] = {}  # tokens, as of when
        self._held_back: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def passes(self, kind: Hashable) -> int | None:
        """None where the event is over the limit; else how many were since the last one."""
        with self._lock:
            now = self._clock()
            tokens, then = self._kinds.get(kind, (float(self._burst), now))
            tokens = min(float(self._burst), tokens + (now - then) / self._every_s)
            if tokens < 1:
                self._kinds[kind] = tokens, now
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return None
            self._kinds[kind] = tokens - 1, now
            return self._held_back.pop(kind, 0)
