"""The lines below the canvas: where the work stands and how fast it goes. Knows no terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from rich.text import Text

_BAR = 7  # so that all fits a terminal of 80 columns in one line
_SEPARATOR = " · "


class Pace:
    """Counts steps, and the time that the model takes: not the time that drawing takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = 0
        self.busy_s = 0.0
        self._resumed = clock()

    def arrived(self, is_step: bool) -> None:
        """The model has handed over an event; its time stops."""
        self.busy_s += self._clock() - self._resumed
        self.steps += is_step

    def resume(self) -> None:
        """The event has been dealt with; the model goes on."""
        self._resumed = self._clock()

    def fields(self, visible: int) -> list[str]:
        """Speed so far, with `visible` tokens to show for it."""
        return speed(self.steps, self.busy_s, visible)


def speed(steps: int, seconds: float, visible: int) -> list[str]:
    """ms per step, tokens per forward, visible tokens per second; nothing before there is any.

    Numbers are padded, so that nothing beside or below them moves while they change.
    """
    if not steps or seconds <= 0:
        return []
    return [
        f"{_round(seconds / steps * 1000)} ms/step",
        f"{_round(visible / steps)} tok/forward",
        f"{_round(visible / seconds)} tok/s",
    ]


def progress(canvas: int, step: int, max_steps: int, share: float) -> list[str]:
    """Canvas and step, counted from 1, and a bar of the accepted share of the canvas."""
    full = round(share * _BAR)
    bar = "━" * full + "╌" * (_BAR - full)
    return [f"canvas {canvas + 1}", f"step {step:{len(str(max_steps))}}/{max_steps}", bar]


def summary(stats: Any) -> list[str]:
    """What a finished reply took, from its Stats; loading and drawing are not in it."""
    steps, canvases = sum(stats.steps), stats.canvases
    if not steps:
        return []
    seconds = stats.prefill_s + stats.denoise_s + stats.commit_s
    figures = speed(steps, seconds, stats.output_tokens)
    if not stats.output_tokens:  # rates of tokens would be zeros
        figures = figures[:1]
    return [
        f"{_count(steps, 'step')} in {_count(canvases, 'canvas', 'canvases')}",
        *map(str.strip, figures),
    ]


def lines(fields: list[str], width: int, most: int) -> list[Text]:
    """The fields on dim lines of `width` cells, broken between fields where that is possible; what
    exceeds `most` lines is left out."""
    rows: list[str] = []
    for field in fields:
        if rows and len(rows[-1] + _SEPARATOR + field) <= width:
            rows[-1] += _SEPARATOR + field
        else:
            rows += textwrap.wrap(field, width, break_on_hyphens=False)
    return [Text(row, style="dim") for row in rows[:most]]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _round(value: float) -> str:
    """Three significant digits, without an exponent, in four characters while that is enough."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2  # 99.96 would become 100.0
    return f"{value:4.{digits}f}"
