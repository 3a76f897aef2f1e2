"""`Turbo`: which steps compute only a part of a canvas. Approximate, and off by default.

Late in a canvas most positions have settled: their token, and what the others read of them, hardly
changes any more.  Such a position may keep its keys, values and statistics from an earlier step.
`step/recompute.py` does it; docs/samplers.md has what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.options.limits import MOST_NATS, MOST_STEPS, MOST_TOKENS
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class Turbo:
    """A canvas begins with `first` whole steps; then at most `partial` steps in a row leave out
    settled positions. A position has settled where its token was accepted, was the most probable
    one of the step before too, and has an entropy of at most `settled` nats. Positions up to `near`
    places beside one that has not settled are computed with it. No canvas ends after a step that
    left something out, and its last step is a whole one."""

    first: int = 3
    partial: int = 2
    settled: float = 0.01
    near: int = 2

    def __post_init__(self) -> None:
        for name, low, high in (
            ("first", 1, MOST_STEPS),
            ("partial", 1, MOST_STEPS),
            ("near", 0, MOST_TOKENS),
        ):
            value = getattr(self, name)
            if not (is_whole(value) and low <= value <= high):
                raise ValueError(
                    f"turbo.{name}: must be a whole number from {low} to {high}, "
                    f"got {quoted(value)}"
                )
        if not (is_number(self.settled) and 0 <= self.settled <= MOST_NATS):
            raise ValueError(
                f"turbo.settled: must be from 0 to {MOST_NATS:.0e} nats, got {self.settled!r}"
            )
