"""Stopping rules: when a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.diffusion.sampler import StepView
from sfumato.options import default
from sfumato.options.limits import MOST_NATS, MOST_STABILITY
from sfumato.weights.errors import quoted


class Stopping(Protocol):
    """Decides whether a canvas has settled. What it may ask for is said at `Sampler`."""

    def done(self, view: StepView) -> Tensor:
        """bool []: True ends the canvas after this step, as converged."""
        ...


@dataclass(frozen=True)
class StableAndConfident:
    """The argmax canvas equals those of the last `stability` steps, and the mean entropy of its
    free positions is under `confidence` nats (the reference's rule)."""

    stability: int = default("stability")
    confidence: float = default("confidence")

    def __post_init__(self) -> None:
        if not (is_whole(self.stability) and 0 <= self.stability <= MOST_STABILITY):
            raise ValueError(
                f"stability: must be a whole number of steps from 0 to {MOST_STABILITY}, got "
                f"{quoted(self.stability)}"
            )
        if not (is_number(self.confidence) and 0 < self.confidence <= MOST_NATS):
            raise ValueError(
                f"confidence: must be over 0 and at most {MOST_NATS:.0e} nats, got "
                f"{quoted(self.confidence)}"
            )

    def done(self, view: StepView) -> Tensor:
        free = (~view.pinned).sum(dim=-1).clamp(min=1)
        confident = view.stats.entropy.sum(dim=-1) / free < self.confidence
        return confident & (view.unchanged >= self.stability)


@dataclass(frozen=True)
class Never:
    """Runs every canvas to its last step: for benchmarks, where steps must not depend on text."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
