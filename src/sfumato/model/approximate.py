"""The soft embedding, summed chunk by chunk, and what may be left out of it.

`Skip` leaves out chunks that hold little mass, and so saves their part of the head's second
product.  Knows scores and masses; the head knows what the scores are of, and `diffusion/` who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.ops.online_softmax import SoftmaxState
from sfumato.ops.reference import ROWS, Weight


@dataclass(frozen=True)
class Skip:
    """Lets the soft embedding leave out, at each position, the chunks of the vocabulary that hold
    too little of its distribution to matter; the other statistics stay exact.

    A chunk is left out where its mass is at most share / chunks of a lower bound of the whole mass:
    the mass seen so far, or that of one token. So the probabilities left out sum to `share` at
    most, and the vector's error is share · sqrt(hidden) · the longest embedding row at most. The
    guess's score may differ by d from the pass's, by rounding: the bound is then share · e^d.
    """

    share: Tensor  # float32 [positions], of the whole mass; 0 skips nothing
    guess: Tensor  # int64 [positions]: a token that may be probable, such as the last step's argmax


@dataclass(frozen=True)
class Limit:
    """The mass under which a position leaves a chunk out of its soft embedding."""

    exact: Tensor  # int64 [n]: the positions that leave out no chunk
    log_share: Tensor  # float32 [positions]: of one chunk; infinite where this decides nothing
    floor: Tensor  # float32 [positions]: the score over temperature of some token

    def exceeded(self, state: SoftmaxState, sums: Tensor) -> Tensor:
        """The positions int64 [n] that need the chunk just taken into `state`: sums [positions,
        blocks] are the masses of its blocks, relative to the distribution's peak."""
        # In logarithms: relative to an early peak, the floor's mass may be infinite.
        least = torch.maximum(state.sum_exp.log(), self.floor - state.max)
        return (sums.sum(dim=1).log() > self.log_share + least).nonzero()[:, 0]


class SoftSum:
    """Σ mass · embedding float32 [positions, hidden], relative to the distribution's peak."""

    def __init__(self, hidden: Tensor, limit: Limit | None) -> None:
        """hidden [positions, hidden]; limit: which chunks are left out, None for none."""
        self.sum = torch.zeros_like(hidden, dtype=torch.float32)
        self._limit = limit

    def add(
        self,
        state: SoftmaxState,
        mass: Tensor,
        sums: Tensor,
        fade: Tensor,
        columns: Callable[[], Weight],
    ) -> None:
        """Adds a chunk just taken into `state`, with what `ops.update_softmax` returned of it;
        columns: gives its rows of the embedding, transposed [hidden, n], called only where they are
        needed."""
        self.sum.mul_(fade[:, None])
        if self._limit is None:
            self.sum.add_(ops.linear(mass, columns()))
            return
        some = self._limit.exceeded(state, sums)
        exact = self._limit.exact
        if len(exact):
            self.sum.index_add_(0, exact, ops.linear(mass[exact], columns()).float())
        if len(some):  # meant to be few, so by products of fewer rows
            self.sum.index_add_(0, some, ops.linear(mass[some], columns(), ROWS).float())
