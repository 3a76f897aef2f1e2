"""What changes from a canvas's first step to its last: the temperature of the distribution, and how
many tokens of it count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.options import default
from sfumato.options.limits import MAX_TEMPERATURE, MIN_TEMPERATURE
from sfumato.options.limits import MOST_COUNTED as MOST
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


class Schedule(Protocol):
    """A temperature for every step."""

    def temperature(self, step: int, max_steps: int) -> float:
        """step counts 1..max_steps; the result is > 0."""
        ...


@dataclass(frozen=True)
class LinearTemperature:
    """From `t_max` at the first step down towards `t_min`, the reference's schedule."""

    t_min: float = default("t_min")
    t_max: float = default("t_max")

    def __post_init__(self) -> None:
        for name, low in (("t_min", 0), ("t_max", MIN_TEMPERATURE)):
            value = getattr(self, name)
            if not (is_number(value) and low <= value <= MAX_TEMPERATURE):
                raise Refused(name, f"must be from {low:g} to {MAX_TEMPERATURE:g}, got {value!r}")
        if self.t_min > self.t_max:
            raise Refused(
                ("t_min", "t_max"), f"need t_min <= t_max, got {self.t_min!r} and {self.t_max!r}"
            )

    def temperature(self, step: int, max_steps: int) -> float:
        remaining = max_steps + 1 - step
        return self.t_min + (self.t_max - self.t_min) * (remaining / max_steps)


class Counts(Protocol):
    """A number of tokens for every step."""

    def k(self, step: int, max_steps: int) -> int:
        """step counts 1..max_steps; the result is from 1 to MOST."""
        ...


@dataclass(frozen=True)
class SoftTopK:
    """The `first` most probable tokens at the first step, `last` at the last one, and in between as
    many as fall (or rise) by the same factor from step to step; without `last`, `first` always.

    They alone make a position's draw and its soft embedding; the entropy stays that of all.
    """

    first: int
    last: int | None = None

    def __post_init__(self) -> None:
        for value in (self.first, self.first if self.last is None else self.last):
            if not (is_whole(value) and 1 <= value <= MOST):
                raise Refused(
                    "soft_top_k", f"must be whole numbers from 1 to {MOST}, got {value!r}"
                )

    def k(self, step: int, max_steps: int) -> int:
        """step counts 1..max_steps; the result is from 1 to MOST."""
        if self.last is None or max_steps == 1:
            return self.first
        return round(self.first * (self.last / self.first) ** ((step - 1) / (max_steps - 1)))


def temperature_at(schedule: Schedule, step: int, max_steps: int) -> float:
    """What a schedule says of a step. Raises ValueError where that is no temperature."""
    value = _call(f"schedule {type(schedule).__name__}", schedule.temperature, step, max_steps)
    if not (is_number(value) and 0 < value <= MAX_TEMPERATURE):
        raise Refused(
            f"schedule {type(schedule).__name__}",
            f"temperature must return a number over 0 and at most {MAX_TEMPERATURE:.0e}, got "
            f"{quoted(value)} at step {step}",
        )
    return float(value)


def count_at(counts: Counts, step: int, max_steps: int) -> int:
    """How many tokens count at a step. Raises ValueError where that is no count."""
    count = _call(f"soft_top_k {type(counts).__name__}", counts.k, step, max_steps)
    if not (is_whole(count) and 1 <= count <= MOST):
        raise Refused(
            f"soft_top_k {type(counts).__name__}",
            f"k must return a whole number from 1 to {MOST}, got {quoted(count)} at step {step}",
        )
    return int(count)


def _call(what: str, method: Callable[[int, int], Any], step: int, max_steps: int) -> Any:
    try:
        return method(step, max_steps)
    except Exception as error:
        raise Refused(
            what,
            f"{method.__name__} raised {type(error).__name__} at step {step}: {str(error)[:200]}",
        ) from error
