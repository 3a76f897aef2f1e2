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

from sfumato.engine.audit import AuditLog, Facts, entry
from sfumato.engine.events import Terminal
from sfumato.engine.request import AnyRequest

logger = logging.getLogger(__name__)

MOST_LINES = 10_000  # that wait for the disk; more are lost
CLOSE_S = 5.0  # for the last lines to be written
QUIET_S = 60.0  # between two log lines about the same fault


@dataclass(frozen=True)
class AuditCounts:
    """Since the start."""

    overflowed: int  # lines lost because too many waited
    unwritten: int  # lines lost because the file could not be written
    errors: int  # lines lost by an exception that no file explains
    waiting: int  # lines that wait now
    alive: bool  # whether the thread that writes them runs


class AuditWriter:
    """Writes to a log in the background, in order, and closes it in the end. Any thread may
    write. Failures are counted and logged, and do not stop the lines that follow."""

    def __init__(self, log: AuditLog, most: int = MOST_LINES) -> None:
        self._log = log
        self._lines: Queue[dict[str, Any] | None] = Queue(most)
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
            self._thread.is_alive(),
        )

    def write(self, line: dict[str, Any]) -> None:
        """Never waits: where too many lines wait already this one is lost, with a warning."""
        try:
            self._lines.put_nowait(line)
        except Full:
            with self._lock:
                self._overflowed += 1
            if self._may_log("overflow"):
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
        while (line := self._lines.get()) is not None:
            self._guarded(self._log.write, line)
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
