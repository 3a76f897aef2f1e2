"""Stopping rules: when a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.diffusion.sampler import StepView


class Stopping(Protocol):
    """Decides whether a canvas has settled. What it may ask for is said at `Sampler`."""

    def done(self, view: StepView) -> Tensor:
        """bool []: True ends the canvas after this step, as converged."""
        ...


@dataclass(frozen=True)
class StableAndConfident:
    """The argmax canvas equals those of the last `stability` steps, and the mean entropy of its
    free positions is under `confidence` nats (the reference's rule)."""

    stability: int = 1
    confidence: float = 0.005

    def __post_init__(self) -> None:
        stable = is_whole(self.stability) and self.stability >= 0
        if not (stable and is_number(self.confidence) and self.confidence > 0):
            raise ValueError(
                "stability, confidence: need a whole stability >= 0 and confidence > 0 nats, got "
                f"{self.stability!r} and {self.confidence!r}"
            )

    @property
    def history(self) -> int:
        return self.stability

    def done(self, view: StepView) -> Tensor:
        free = (~view.pinned).sum(dim=-1).clamp(min=1)
        confident = view.stats.entropy.sum(dim=-1) / free < self.confidence
        recent = view.history[max(0, len(view.history) - self.stability) :]
        return confident & (recent == view.stats.argmax).all()


@dataclass(frozen=True)
class Never:
    """Runs every canvas to its last step: for benchmarks, where steps must not depend on text."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
