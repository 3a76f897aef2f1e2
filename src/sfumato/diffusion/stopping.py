"""Stopping rules: when a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.diffusion.sampler import StepView
from sfumato.options import default
from sfumato.options.limits import MOST_NATS, MOST_STABILITY
from sfumato.refused import Refused
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
            raise Refused(
                "stability",
                f"must be a whole number of steps from 0 to {MOST_STABILITY}, got "
                f"{quoted(self.stability)}",
            )
        if not (is_number(self.confidence) and 0 < self.confidence <= MOST_NATS):
            raise Refused(
                "confidence",
                f"must be over 0 and at most {MOST_NATS:.0e} nats, got {quoted(self.confidence)}",
            )

    def done(self, view: StepView) -> Tensor:
        free = (~view.pinned).sum(dim=-1).clamp(min=1)
        confident = view.stats.entropy.sum(dim=-1) / free < self.confidence
        return confident & (view.unchanged >= self.stability)


@dataclass(frozen=True)
class SettledToEnd(StableAndConfident):
    """As `StableAndConfident`, but of the positions up to the first end token that has settled
    alone; of all of them where none has.

    Such an end token is the argmax of a position that is not pinned, was so in the last `stability`
    steps, and has an entropy under `confidence`.  What stands behind it is no part of the reply.
    """

    ends: tuple[int, ...] = ()

    @property
    def history(self) -> int:
        """Earlier argmax canvases that the rule reads."""
        return max(1, self.stability)

    def done(self, view: StepView) -> Tensor:
        argmax, entropy, known = view.stats.argmax, view.stats.entropy, view.history.shape[-2]
        if self.stability > known:  # no canvas has so many steps
            return entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
        same = (view.history[..., known - self.stability :, :] == argmax).all(dim=-2)
        is_end = torch.zeros_like(view.pinned)
        for end in self.ends:
            is_end = is_end | (argmax == end)
        is_end = is_end & ~view.pinned & same & (entropy < self.confidence)
        tested = is_end.cumsum(dim=-1) - is_end.long() == 0
        free = (tested & ~view.pinned).sum(dim=-1).clamp(min=1)
        mean = entropy.masked_fill(~tested, 0.0).sum(dim=-1) / free
        return (mean < self.confidence) & (same | ~tested).all(dim=-1)


@dataclass(frozen=True)
class Never:
    """Runs every canvas to its last step: for benchmarks, where steps must not depend on text."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
