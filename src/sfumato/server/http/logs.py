"""The server's log on standard error: a line each, of text or JSON, with its time and level.

Knows no requests.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from sfumato.server.http.ratelimit import RateLimit

FORMATS = ("text", "json")
# Loggers whose records a client can cause over and over.
REPEATED = ("uvicorn.error", "sfumato.server.http.error_handlers")

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
    """2026-11-22T10:00:00.000Z WARNING sfumato.server: what happened; a trace below, indented"""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = record.message.translate(_CONTROLS)
        return f"{record.asctime} {record.levelname} {record.name}: {message}"

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))

    def usesTime(self) -> bool:
        return True


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


def _indented(trace: str) -> str:
    """The trace, indented, so that no line of it looks like a record."""
    return "\n".join(f"  {line.translate(_CONTROLS)}" for line in trace.split("\n"))


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
