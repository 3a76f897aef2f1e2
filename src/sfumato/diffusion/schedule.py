"""What changes from a canvas's first step to its last: how hot the model's law is, and how many
tokens of it count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sfumato.diffusion.checks import is_number, is_whole


class Schedule(Protocol):
    """A temperature for every step."""

    def temperature(self, step: int, max_steps: int) -> float:
        """step counts 1..max_steps; the result is > 0."""
        ...


@dataclass(frozen=True)
class LinearTemperature:
    """From `t_max` at the first step down towards `t_min`, the reference's schedule."""

    t_min: float = 0.4
    t_max: float = 0.8

    def __post_init__(self) -> None:
        numbers = is_number(self.t_min) and is_number(self.t_max)
        if not (numbers and 0 <= self.t_min <= self.t_max and self.t_max > 0):
            raise ValueError(
                f"t_min, t_max: need 0 <= t_min <= t_max and t_max > 0, "
                f"got {self.t_min!r} and {self.t_max!r}"
            )

    def temperature(self, step: int, max_steps: int) -> float:
        remaining = max_steps + 1 - step
        return self.t_min + (self.t_max - self.t_min) * (remaining / max_steps)


MOST = 2048  # more rows of the embedding would be gathered, position by position, than it has


@dataclass(frozen=True)
class SoftTopK:
    """The `first` likeliest tokens at the first step, `last` at the last one, and in between as
    many as fall (or rise) by the same factor from step to step; without `last`, `first` always.

    They alone make a position's draw and its soft embedding; the entropy stays that of all.
    """

    first: int
    last: int | None = None

    def __post_init__(self) -> None:
        for value in (self.first, self.first if self.last is None else self.last):
            if not (is_whole(value) and 1 <= value <= MOST):
                raise ValueError(
                    f"soft_top_k: must be whole numbers from 1 to {MOST}, got {value!r}"
                )

    def k(self, step: int, max_steps: int) -> int:
        """step counts 1..max_steps; the result is from 1 to MOST."""
        if self.last is None or max_steps == 1:
            return self.first
        return round(self.first * (self.last / self.first) ** ((step - 1) / (max_steps - 1)))
