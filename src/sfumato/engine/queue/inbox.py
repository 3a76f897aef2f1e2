"""What other threads hand to the engine's thread: submitted rows, resets of the prefix cache, and
the end. Knows no slots and no network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition

from sfumato.engine.errors import EngineDead, QueueFull
from sfumato.engine.row import Row

Resets = list[Future[int]]


class Inbox:
    """Any thread may put; the engine's thread takes."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._rows: list[Row] = []  # submitted, not yet seen by the engine's thread
        self._resets: Resets = []
        self.closed: str | None = None  # why nothing is taken any more
        self.stopped = False  # whether the engine's thread is to end

    def __len__(self) -> int:
        """Rows that were submitted and not taken yet."""
        return len(self._rows)

    def put(self, row: Row, has_room: Callable[[], bool], limit: int) -> None:
        """Submits a row. has_room: whether the queue takes one more; limit: rows that may wait, for
        the message. Raises EngineDead and QueueFull."""
        with self._changed:
            if self.closed is not None:
                raise EngineDead(self.closed)
            if not has_room():
                raise QueueFull(
                    f"{limit} requests wait already, which is the limit; try again later, or raise "
                    "--queue"
                )
            self._rows.append(row)
            self._changed.notify_all()

    def put_reset(self) -> Future[int]:
        """Asks for a reset of the prefix cache. Raises EngineDead."""
        done: Future[int] = Future()
        with self._changed:
            if self.closed is not None:
                raise EngineDead(self.closed)
            self._resets.append(done)
            self._changed.notify_all()
        return done

    def take(self, queue: deque[Row]) -> Resets:
        """Moves the rows into a queue, so that each is always in one of both; returns the resets
        that are requested and not cancelled."""
        with self._changed:
            queue.extend(self._rows)
            self._rows.clear()
            resets, self._resets = self._resets, []
        return [reset for reset in resets if reset.set_running_or_notify_cancel()]

    def close(self, reason: str, stop: bool = False, overrule: bool = False) -> None:
        """Takes nothing any more. The first reason counts, unless one is to overrule it; stop: the
        engine's thread ends."""
        with self._changed:
            self.closed = reason if overrule else self.closed or reason
            self.stopped = self.stopped or stop
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout_s: float | None, although_rows: bool = False) -> None:
        """Returns when something was put or `wake` was called, or after timeout_s. although_rows:
        rows that are there already do not count."""
        with self._changed:
            if not (self.stopped or self._resets) and (although_rows or not self._rows):
                self._changed.wait(timeout_s)
