"""Curves as an SVG picture: points on lines, with their intervals. Knows not what they show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#1b6ca8", "#c0392b", "#2e7d32", "#8e44ad", "#b9770e", "#00838f", "#5d4037", "#607d8b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 320, 56, 24, 624, 280
_LINE = 16  # of the legend
_MOST_TICKS = 6


class Point(NamedTuple):
    """A place of a curve; with an interval it is drawn as a dot with a bar from low to high."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""  # shown where a pointer rests on the dot


def curves(
    lines: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    bottom: float = 0.0,
    top: float | None = None,
) -> str:
    """The picture of these lines, by name, from x = 0 on. x and y: what the axes say; bottom, top:
    of the vertical axis (None: the greatest value)."""
    points = [point for each in lines.values() for point in each]
    last = max((point.x for point in points), default=1) or 1
    high = (max((p.y for p in points), default=bottom + 1) if top is None else top) or 1
    span = max(high - bottom, 1e-12)

    def place(point: Point, value: float) -> tuple[float, float]:
        inside = min(max(value - bottom, 0.0), span)
        across = _LEFT + (_RIGHT - _LEFT) * point.x / last
        return across, _BOTTOM - (_BOTTOM - _TOP) * inside / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_LEFT},{_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#555"/>',
        f'<text x="{_LEFT}" y="{_TOP - 8}">{escape(y)}</text>',
        f'<text x="{_RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x)}</text>',
    ]
    for tick in _ticks(0, last):
        across, _ = place(Point(tick, 0), 0)
        parts.append(
            f'<text x="{across:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in _ticks(bottom, high):
        _, up = place(Point(0, tick), tick)
        parts.append(f'<text x="{_LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{tick:g}</text>')
    ends = [place(line[-1], line[-1].y)[1] for line in lines.values() if line]
    is_high = sum(ends) < len(ends) * (_TOP + _BOTTOM) / 2  # then the legend stands below
    first = _BOTTOM - _LINE * len(lines) + 4 if is_high else _TOP
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = " ".join("{:.1f},{:.1f}".format(*place(point, point.y)) for point in line)
        parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}"/>')
        for point in line:
            if point.low is None or point.high is None:
                continue
            (across, up), (_, low) = place(point, point.y), place(point, point.low)
            _, high_end = place(point, point.high)
            parts.append(
                f'<path d="M{across:.1f},{low:.1f}V{high_end:.1f}" stroke="{colour}"/>'
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}">'
                f"<title>{escape(point.label or name)}</title></circle>"
            )
        where = f'x="{_RIGHT}" y="{first + _LINE * number}" text-anchor="end" fill="{colour}"'
        parts.append(f"<text {where}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> Iterator[float]:
    """Round numbers from low to high, a handful."""
    rough = (high - low) / _MOST_TICKS
    unit = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(unit * each for each in (1, 2, 5, 10) if unit * each >= rough * (1 - 1e-9))
    number = math.ceil(low / step - 1e-9)
    while number * step <= high * (1 + 1e-9):
        yield round(number * step, 12)
        number += 1
