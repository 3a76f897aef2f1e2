"""Samplers: which of a step's drawn tokens are accepted; the rest become noise again.

A sampler is a small frozen value with one method, a pure tensor function of the head's statistics.
`docs/samplers.md` shows how to write one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.model.head import HeadStats
from sfumato.options import default
from sfumato.options.limits import MOST_NATS, MOST_TOKENS
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class StepView:
    """What samplers and stopping rules see of one row after a denoising forward."""

    step: Tensor  # int64 [], on the device: 1..max_steps
    max_steps: int
    tokens: Tensor  # int64 [length]: the canvas that went in
    stats: HeadStats  # of the row: argmax, drawn, entropy, top_probs, … with leading axis [length]
    history: Tensor  # int64 [rows, length]: earlier argmax canvases, newest last; -1: none yet
    pinned: Tensor  # bool [length]: positions whose token is fixed; entropy 0, always accepted
    unchanged: Tensor  # int64 []: so many steps before this one, in a row, had this argmax canvas


class Sampler(Protocol):
    """Decides which positions keep the token drawn at this step.

    A sampler that cannot do with `HeadStats` sets a class attribute `needs_logits = True` and
    finds float32 [length, vocab] in `view.stats.logits`; one that looks back over more than one
    step sets `history`, the rows of `view.history` that it needs. So does a stopping rule.
    """

    def accept(self, view: StepView) -> Tensor:
        """bool [length]: True where the drawn token stays in the canvas."""
        ...


@dataclass(frozen=True)
class EntropyBound:
    """Accepts the positions of least entropy, while the summed entropy of those before each
    stays within `bound` nats (arXiv 2505.24857; the reference's sampler)."""

    bound: float = default("entropy_bound")

    def __post_init__(self) -> None:
        if not (is_number(self.bound) and 0 <= self.bound <= MOST_NATS):
            raise Refused(
                "entropy_bound", f"must be from 0 to {MOST_NATS:.0e} nats, got {self.bound!r}"
            )

    def accept(self, view: StepView) -> Tensor:
        # Of equal entropies the lower position comes first, on every device.
        ascending, order = view.stats.entropy.sort(dim=-1, stable=True)
        # Cumulative minus own, as the reference computes it: an exclusive sum rounds otherwise.
        inside = ascending.cumsum(dim=-1) - ascending <= self.bound
        return torch.zeros_like(inside).scatter(-1, order, inside)


@dataclass(frozen=True)
class FixedCount:
    """Accepts the `count` free positions whose first token is most probable, `count` more at
    every step."""

    count: int = default("count")

    def __post_init__(self) -> None:
        if not (is_whole(self.count) and 1 <= self.count <= MOST_TOKENS):
            raise Refused(
                "count",
                f"must be from 1 to {MOST_TOKENS} positions a step, got {quoted(self.count)}",
            )

    def accept(self, view: StepView) -> Tensor:
        confidence = view.stats.top_probs[..., 0].masked_fill(view.pinned, -1.0)
        ranks = confidence.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(confidence.shape[-1], device=confidence.device)
        kept = places < self.count * view.step
        return torch.zeros_like(kept).scatter(-1, ranks, kept)


@dataclass(frozen=True)
class Threshold:
    """Accepts every position whose most probable token has probability `top` or more, or leads the
    runner-up by `margin` or more; and always the most confident free one, so that steps
    progress."""

    top: float = default("threshold")
    margin: float = default("margin")

    def __post_init__(self) -> None:
        for name, value in (("top", self.top), ("margin", self.margin)):
            if not (is_number(value) and 0 <= value <= 1):
                raise Refused(name, f"must be a probability from 0 to 1, got {value!r}")

    def accept(self, view: StepView) -> Tensor:
        first = view.stats.top_probs[..., 0].masked_fill(view.pinned, -1.0)
        sure = (first >= self.top) | (first - view.stats.top_probs[..., 1] >= self.margin)
        return sure | (first == first.amax(dim=-1, keepdim=True)) | view.pinned


SAMPLERS: dict[str, type[EntropyBound | FixedCount | Threshold]] = {
    "entropy-bound": EntropyBound,
    "fixed-count": FixedCount,
    "threshold": Threshold,
}
"""Names by which command line and HTTP know the samplers."""
