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
from sfumato.ops.reference import ROWS, Weight
from sfumato.weights.blocks import QuantizedTensor


@dataclass(frozen=True)
class Skip:
    """Lets the soft embedding of a position be that of its TOP most probable tokens alone, where
    they hold at least 1 - share of the probability; the other statistics stay exact.

    The probabilities left out then sum to `share` at most, as the pass itself finds, and the
    vector's error is share · sqrt(hidden) · the longest embedding row at most. `expected` decides
    which positions are tried, and never what may be left out: a position that is tried in vain is
    summed in full, in a second sweep.
    """

    share: Tensor  # float32 [positions], of the whole mass; 0 leaves out nothing
    expected: Tensor  # bool [positions]: where that share is expected to suffice

    @property
    def tried(self) -> Tensor:
        """bool [positions]."""
        return self.expected & (self.share > 0)


@dataclass(frozen=True)
class Summed:
    """The positions whose soft embedding is summed chunk by chunk; all others' is another's."""

    always: Tensor  # int64 [n]: those that never leave out anything
    now: Tensor  # int64 [m]: those that may, but do not in this pass

    @property
    def none(self) -> bool:
        return len(self.always) + len(self.now) == 0


class SoftSum:
    """Σ mass · embedding float32 [positions, hidden], relative to the distribution's peak."""

    def __init__(self, hidden: Tensor, summed: Summed | None) -> None:
        """hidden [positions, hidden]; summed: None for all positions."""
        self.sum = torch.zeros_like(hidden, dtype=torch.float32)
        self._summed = summed

    def add(self, mass: Tensor, fade: Tensor, columns: Callable[[], Weight]) -> None:
        """Adds a chunk of which `ops.update_softmax` returned mass and fade; columns: gives its
        rows of the embedding, transposed [hidden, n], called only where they are needed."""
        if self._summed is None:
            self.sum.mul_(fade[:, None])
            self.sum.add_(ops.linear(mass, columns()))
            return
        if self._summed.none:
            return
        self.sum.mul_(fade[:, None])
        always, now = self._summed.always, self._summed.now
        if len(always):
            self.sum.index_add_(0, always, ops.linear(mass[always], columns()).float())
        self.add_some(now, mass[now], columns)

    def add_some(self, which: Tensor, mass: Tensor, columns: Callable[[], Weight]) -> None:
        """Adds mass [n, some] · a chunk's rows, given as `add` takes them, at the positions `which`
        int64 [n], by products that do not depend on how many positions there are."""
        if len(which):
            self.sum.index_add_(0, which, ops.linear(mass, columns(), ROWS).float())


def sum_of_top(
    state: SoftmaxState,
    skip: Skip,
    which: Tensor,
    embedding: Tensor | QuantizedTensor,
    soft: SoftSum,
) -> Tensor:
    """Of the positions `which` int64 [n], after a pass: sets the soft embedding of those whose most
    probable tokens hold enough, and returns the others, int64 [m]."""
    mass = (state.top[which] - state.max[which, None]).exp()
    missing = 1 - mass.sum(dim=1) / state.sum_exp[which]
    enough = missing <= skip.share[which]
    held, mass = which[enough], mass[enough]
    if len(held):
        ids, total = state.top_ids[held], torch.zeros_like(soft.sum[held])
        for place in range(ids.shape[1]):  # one by one: the sum is of the position's own numbers
            rows = ops.embed(ids[:, place], embedding, torch.float32)
            total += mass[:, place, None] * rows
        soft.sum[held] = total
    return which[~enough]


def products(hidden: Tensor, weight: Weight) -> Tensor:
    """hidden [n, hidden] · a chunk, by products that do not depend on how many positions there
    are."""
    return ops.linear(hidden, weight, ROWS)
