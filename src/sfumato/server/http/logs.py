"""The server's log on standard error: a line each, of text or JSON, with its time and level; and a
limit for lines that repeat, so that no client can fill a log.

Knows no requests."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import TextIO

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
        # Tokens, as of when, and how many events were held back since the last one.
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}
        self._lock = threading.Lock()

    def passes(self, kind: Hashable) -> int | None:
        """None where the event is over the limit; else how many were since the last one."""
        with self._lock:
            now = self._clock()
            tokens, then, held_back = self._kinds.get(kind, (float(self._burst), now, 0))
            tokens = min(float(self._burst), tokens + (now - then) / self._every_s)
            passes = tokens >= 1
            self._kinds[kind] = (tokens - 1, now, 0) if passes else (tokens, now, held_back + 1)
            return held_back if passes else None


FORMATS = ("text", "json")

# Loggers whose records a client can cause over and over.
REPEATED = ("uvicorn.error", "sfumato.server.http.errors")

# No line ends and no terminal codes, whatever a client sent.
_CONTROLS = str.maketrans({code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))})


def configure(form: str = "text", verbose: bool = False, stream: TextIO | None = None) -> None:
    """Writes warnings and errors to `stream`, with `verbose` information too; replaces the logging
    that was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in REPEATED:
        logger = logging.getLogger(name)
        for old in [each for each in logger.filters if isinstance(each, RepeatFilter)]:
            logger.removeFilter(old)
        logger.addFilter(RepeatFilter())


class RepeatFilter(logging.Filter):
    """Drops warnings and errors that repeat too often; the next that passes says how many."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        held_back = self._limit.passes((record.levelno, record.msg))
        if held_back:
            record.msg, record.args = f"{record.getMessage()} ({held_back} more like it)", None
        return held_back is not None


class TextFormatter(logging.Formatter):
    """2026-11-22T10:00:00.000Z WARNING sfumato.server: what happened; a trace below, indented, so
    that no line of it looks like a record"""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        below = [part for part in (trace, record.stack_info) if part]
        lines = [f"  {line}" for line in "\n".join(below).split("\n") if below]
        first = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        return "\n".join(line.translate(_CONTROLS) for line in (first, *lines))


class JsonFormatter(logging.Formatter):
    """An object each: time, level, logger, message, and exception where there is a trace."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
