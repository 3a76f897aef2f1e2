"""Audit lines written by a thread of their own: a disk that stalls holds up no request.

Knows no files: an `AuditLog` writes them.
"""

from __future__ import annotations

import logging
from queue import Full, Queue
from threading import Thread
from typing import Any

from sfumato.engine.audit import AuditLog, Facts, entry
from sfumato.engine.events import Failed, Finished
from sfumato.engine.request import Request

logger = logging.getLogger(__name__)

MOST_LINES = 10_000  # that wait for the disk; more are lost
CLOSE_S = 5.0  # for the last lines to be written


class Behind:
    """Writes to a log in the background, in order, and closes it in the end. Any thread may
    write."""

    def __init__(self, log: AuditLog, most: int = MOST_LINES) -> None:
        self._log = log
        self._lines: Queue[dict[str, Any] | None] = Queue(most)
        self._lost = False
        self._thread = Thread(target=self._run, name="sfumato-audit", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Never waits: where too many lines wait already this one is lost, with one warning."""
        try:
            self._lines.put_nowait(line)
            self._lost = False
        except Full:
            if not self._lost:
                logger.warning(
                    "audit log: %s takes no lines; they are lost until it does", self._log.path
                )
            self._lost = True

    def record(
        self, request: Request, event: Finished | Failed, facts: Facts, held_back: int = 0
    ) -> None:
        """Writes the line of one request. held_back: refusals before it that have none."""
        line = entry(request, event, facts, self._log.text)
        self.write(line | {"held_back": held_back} if held_back else line)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Waits so long for what has been written to reach the file."""
        try:
            self._lines.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._log.write(line)
        self._log.close()
