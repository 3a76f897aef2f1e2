"""Times as Ollama writes them. Knows no reply."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The time of the day, in UTC."""
    return shown(datetime.now(UTC))


def shown(moment: datetime) -> str:
    """moment: in UTC."""
    return moment.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))
