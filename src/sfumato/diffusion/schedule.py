"""Temperature schedules: how hot the model's law is at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sfumato.diffusion.checks import is_number


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
