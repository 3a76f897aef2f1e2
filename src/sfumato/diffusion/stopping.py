"""Stopping rules: when a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sfumato.diffusion.sampler import StepView


class Stopping(Protocol):
    """Decides whether a canvas has settled."""

    def done(self, view: StepView) -> Tensor:
        """bool []: True ends the canvas after this step, as converged."""
        ...


@dataclass(frozen=True)
class StableAndConfident:
    """The argmax canvas equals those of the last `stability` steps, and the mean entropy is
    under `confidence` nats (the reference's rule)."""

    stability: int = 1
    confidence: float = 0.005

    def __post_init__(self) -> None:
        whole = isinstance(self.stability, int)
        if not whole or self.stability < 0 or not self.confidence > 0:
            raise ValueError(
                "stability, confidence: need a whole stability >= 0 and confidence > 0 nats, got "
                f"{self.stability} and {self.confidence}"
            )

    def done(self, view: StepView) -> Tensor:
        confident = view.stats.entropy.mean(dim=-1) < self.confidence
        if len(view.history) < self.stability:
            return confident & False
        recent = view.history[len(view.history) - self.stability :]
        return confident & (recent == view.stats.argmax).all()


@dataclass(frozen=True)
class Never:
    """Runs every canvas to its last step: for benchmarks, where steps must not depend on text."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
