"""The soft embedding, summed chunk by chunk, and what may be left out of it.

`Skip` leaves out all but the few most probable tokens where these hold almost all of the
probability, and so saves the head's second product.  Knows scores and masses; the head knows what
the scores are of, and `diffusion/` who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.ops.online_softmax import SoftmaxState
from sfumato.ops.reference import ROWS
from sfumato.weights.formats import QuantizedTensor, Weight

AS_ROUNDED = -1.0
"""The share of a position that may leave out as much as rounding hides (see `sufficient`)."""


@dataclass(frozen=True)
class Skip:
    """Lets the soft embedding of a position be that of its TOP most probable tokens alone, where
    they hold at least 1 - share of the probability; the other statistics stay exact.

    The probabilities left out then sum to `share` at most, as the pass itself finds, and the
    vector's error is share · sqrt(hidden) · the longest embedding row at most. `expected` decides
    what is tried, and never what may be left out: where less is held than presumed, all tokens are
    summed, in a second sweep.
    """

    share: Tensor  # float32 [positions], of the probability; 0 leaves out nothing; or AS_ROUNDED
    expected: Tensor  # bool [positions]: where the most probable tokens are presumed to suffice
    # bool [positions]: whose sum waits for the end of the pass, and takes no part in its second
    # product; what `expected` says of others does not count. None: wherever the share is not 0.
    late: Tensor | None = None

    @property
    def waits(self) -> Tensor:
        """bool [positions]: see `late`."""
        asks = self.share != 0
        return asks if self.late is None else asks & self.late


class SoftSum:
    """Σ mass · embedding float32 [positions, hidden], relative to the distribution's peak."""

    def __init__(self, hidden: Tensor, which: Tensor | None) -> None:
        """hidden [positions, hidden]; which: int64 [n], the positions that `add` sums, None for
        all."""
        self.sum = torch.zeros_like(hidden, dtype=torch.float32)
        self._which = which

    def add(self, mass: Tensor, fade: Tensor, columns: Callable[[], Weight]) -> None:
        """Adds a chunk of which `ops.update_softmax` returned mass and fade; columns: gives its
        rows of the embedding, transposed [hidden, n], called only where they are needed."""
        if self._which is None:
            self.sum.mul_(fade[:, None])
            self.sum.add_(ops.linear(mass, columns()))
        elif len(self._which):
            self.sum.mul_(fade[:, None])
            added = ops.linear(mass[self._which], columns())
            self.sum.index_add_(0, self._which, added.float())

    def add_late(self, which: Tensor, mass: Tensor, columns: Weight) -> None:
        """Adds mass [n, some] · a chunk's rows, transposed [hidden, some], at the positions `which`
        int64 [n], by products that do not depend on how many positions there are."""
        self.sum.index_add_(0, which, ops.linear(mass, columns, ROWS).float())


def sufficient(
    state: SoftmaxState,
    skip: Skip,
    embedding: Tensor | QuantizedTensor,
    rounding: float,
    longest: Callable[[], Tensor],
) -> tuple[Tensor, Tensor]:
    """The positions int64 [n] whose TOP most probable tokens suffice after a pass, and Σ mass ·
    embedding of these tokens, float32 [n, hidden], relative to the peak.

    They suffice where they leave out at most the position's share of the probability; for
    AS_ROUNDED, where the share ε that they leave out keeps 2ε · longest at or under `rounding`
    times the norm of Σ p · embedding.  The vector is off by ε · longest at most; the factor 2 is
    what dividing by the mass of these tokens alone would cost.  longest: gives the norm of the
    longest row of the embedding, float32 [].
    """
    mass = (state.top - state.max[:, None]).exp()
    missing = 1 - _sum_of_columns(mass) / state.sum_exp
    # The sum is no longer than `longest`: what leaves out more can never suffice.
    most = torch.where(skip.share == AS_ROUNDED, rounding / 2, skip.share)
    which = ((missing <= most) & (skip.share != 0)).nonzero()[:, 0]
    if not len(which):
        return which, state.max.new_zeros(0, embedding.shape[1])
    ids, mass = state.top_ids[which], mass[which]
    total = mass.new_zeros(len(which), embedding.shape[1])
    for place in range(ids.shape[1]):  # one by one: the sum is of the position's own numbers
        total += mass[:, place, None] * ops.embed(ids[:, place], embedding, torch.float32)
    is_free = skip.share[which] > 0
    if not bool(is_free.all()):
        off = 2 * missing[which] * state.sum_exp[which] * longest()
        is_free |= off <= rounding * total.norm(dim=1)
    return which[is_free], total[is_free]


def _sum_of_columns(values: Tensor) -> Tensor:
    """float32 [n, m] → [n], in the order of the columns, however many rows there are."""
    total = values[:, 0].clone()
    for place in range(1, values.shape[1]):
        total += values[:, place]
    return total


def products(hidden: Tensor, weight: Weight) -> Tensor:
    """hidden [n, hidden] · a chunk, by products that do not depend on how many positions there
    are."""
    return ops.linear(hidden, weight, ROWS)
