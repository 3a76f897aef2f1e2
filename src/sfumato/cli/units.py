"""Sizes and tables for people. Knows no checkpoints and no machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Bytes in decimal units, three significant digits: 16.8 GB."""
    power = 0
    while count >= 999.5 and power < len(_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_UNITS[power]}"


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equally many cells as lines, columns aligned on the left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
