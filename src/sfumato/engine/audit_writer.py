"""Audit lines written by a thread of their own: a disk that stalls holds up no request.

Knows no files: an `AuditLog` writes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Full, Queue
from threading import Lock, Thread
from typing import Any

from sfumato.engine.audit import AuditLog, Facts, entry, to_line
from sfumato.engine.events import Terminal
from sfumato.engine.request import AnyRequest

logger = logging.getLogger(__name__)

MOST_LINES = 10_000  # that wait for the disk; more are lost
MOST_BYTES = 64 << 20  # of these lines; one line may wait whatever its length
CLOSE_S = 5.0  # for the last lines to be written
QUIET_S = 60.0  # between two log lines about the same fault


@dataclass(frozen=True)
class AuditCounts:
    """Since the start."""

    overflowed: int  # lines lost because too many waited
    unwritten: int  # lines lost because the file could not be written
    errors: int  # lines lost by an exception that no file explains
    waiting: int  # lines that wait now
    waiting_bytes: int  # of these, and of the line that is being written
    alive: bool  # whether the thread that writes them runs


class AuditWriter:
    """Writes to a log in the background, in order, and closes it in the end. Any thread may
    write. Failures are counted and logged, and do not stop the lines that follow."""

    def __init__(self, log: AuditLog, most: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._log = log
        self._lines: Queue[bytes | None] = Queue(most)
        self._most_bytes, self._bytes = most_bytes, 0
        self._overflowed = self._errors = 0
        self._quiet_until = {"overflow": 0.0, "error": 0.0}
        self._lock = Lock()  # of the counts: many threads write
        self._thread = Thread(target=self._run, name="sfumato-audit", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> AuditCounts:
        return AuditCounts(
            self._overflowed,
            self._log.lost,
            self._errors,
            self._lines.qsize(),
            self._bytes,
            self._thread.is_alive(),
        )

    def write(self, line: dict[str, Any]) -> None:
        """Never waits and never raises: where too many lines or bytes wait already, this line is
        lost, with a warning."""
        try:
            data = to_line(line)  # here, so that what waits has a size, and holds no request
        except Exception as error:
            self._failed(error)
            return
        with self._lock:
            is_lost = self._bytes > 0 and self._bytes + len(data) > self._most_bytes
            try:
                if not is_lost:
                    self._lines.put_nowait(data)
                    self._bytes += len(data)
            except Full:
                is_lost = True
            self._overflowed += is_lost
        if is_lost and self._may_log("overflow"):
            logger.warning(
                "audit log: %s takes no lines; they are lost until it does", self._log.path
            )

    def record(
        self, request: AnyRequest, event: Terminal, facts: Facts, held_back: int = 0
    ) -> None:
        """Writes the line of one request. held_back: refusals before it that have none. Never
        raises: an audit that fails ends no request."""
        try:
            line = entry(request, event, facts, self._log.text)
            self.write(line | {"held_back": held_back} if held_back else line)
        except Exception as error:
            self._failed(error)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Waits so long for what has been written to reach the file."""
        try:
            self._lines.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (data := self._lines.get()) is not None:
            self._guarded(self._log.append, data)
            with self._lock:
                self._bytes -= len(data)
        self._guarded(self._log.close)

    def _guarded(self, do: Callable[..., None], *what: Any) -> None:
        try:
            do(*what)
        except BaseException as error:  # the thread is for this alone, and must go on
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Counts a line that an exception cost."""
        with self._lock:
            self._errors += 1
        if self._may_log("error"):
            logger.error(
                "audit log: a line of %s is lost (%d so far)",
                self._log.path,
                self._errors,
                exc_info=error,
            )

    def _may_log(self, what: str) -> bool:
        """True once in QUIET_S, so that the log is not flooded."""
        with self._lock:
            now = time.monotonic()
            due = now >= self._quiet_until[what]
            if due:
                self._quiet_until[what] = now + QUIET_S
            return due
