"""The distribution of each position over a vocabulary that is read in chunks, in plain torch.

Knows scores and ids; what they are scores of, and what is done with the state, is the head's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 8  # how many of a distribution's likeliest tokens are kept
BLOCK = 64  # vocabulary ids whose mass is summed apart, for the draw
# Stands for -inf: a finite score whose exponential is zero, but whose product is not NaN.
BANNED = -1e30


@dataclass
class SoftmaxState:
    """What is known of each position's distribution over the vocabulary ids seen so far.

    Masses are relative to `max`, so that no exponential overflows (online softmax).
    """

    max: Tensor  # float32 [positions]: the highest score
    sum_exp: Tensor  # float32 [positions]: Σ e^(s - max)
    sum_shifted: Tensor  # float32 [positions]: Σ e^(s - max) · (s - max)
    argmax: Tensor  # int64 [positions]: of equal scores the lowest id
    top: Tensor  # float32 [positions, TOP], falling; 2 · BANNED where fewer ids were seen
    top_ids: Tensor  # int64 [positions, TOP]

    @classmethod
    def empty(cls, positions: int, device: torch.device) -> SoftmaxState:
        top = torch.full((positions, TOP), 2 * BANNED, device=device)
        ids = torch.zeros(positions, TOP, dtype=torch.int64, device=device)
        zeros = torch.zeros(positions, device=device)
        return cls(top[:, 0].clone(), zeros, zeros.clone(), ids[:, 0].clone(), top, ids)


@dataclass(frozen=True)
class Bans:
    """Tokens that positions may not have: those of position p are ids[first[p]:last[p]].

    All int64, on the CPU, whatever the device of the scores: who makes them knows them there.
    """

    first: Tensor  # [positions]
    last: Tensor  # [positions]
    ids: Tensor

    def covers(self, size: int) -> Tensor:
        """bool [positions]: where all ids of a vocabulary are banned; a position's own differ."""
        return self.last - self.first >= size

    def within(self, first_id: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those among the ids first_id, first_id + 1, …: positions and columns, int64 [n]."""
        positions, ids = self._pairs
        ends = torch.tensor([first_id, first_id + count])
        a, b = torch.searchsorted(ids, ends).tolist()
        return positions[a:b].to(device), (ids[a:b] - first_id).to(device)

    def pairs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of them: positions and ids, int64 [n]."""
        positions, ids = self._pairs
        return positions.to(device), ids.to(device)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """By id."""
        sizes = self.last - self.first
        positions = torch.arange(len(sizes)).repeat_interleave(sizes)
        starts = (self.first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
        ids = self.ids[torch.arange(len(positions)) + starts]
        order = ids.argsort()
        return positions[order], ids[order]


def update(
    state: SoftmaxState,
    raw: Tensor,
    first_id: int,
    temperature: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the scores of the ids first_id, first_id + 1, … into a state, in place.

    raw float [positions, n], which may be overwritten; temperature float32 [positions]; scores
    are softcap · tanh(raw / softcap) / temperature, or raw / temperature where softcap is None;
    banned ones are BANNED.
    Returns, relative to the new peak, the mass e^(s - peak) of each id in `dtype` [positions, n],
    its sums over each BLOCK ids float32 [positions, ⌈n / BLOCK⌉], and the factor e^(old peak -
    peak) float32 [positions] by which all masses returned before have faded.
    """
    scores = raw.float()
    if softcap is not None:
        scores = scores.mul_(1 / softcap).tanh_().mul_(softcap)
    # Clamped after the division: a low temperature would make BANNED infinite again.
    scores = scores.div_(temperature[:, None]).clamp_(min=BANNED)
    if bans is not None:
        scores.index_put_(
            bans.within(first_id, scores.shape[1], scores.device), scores.new_tensor(BANNED)
        )
    best, where = scores.max(dim=1)
    _keep_top(state, scores, best, first_id)
    state.argmax = torch.where(best > state.max, where + first_id, state.argmax)
    peak = torch.maximum(state.max, best)
    drop = state.max - peak
    fade = drop.exp()
    shifted = scores.sub_(peak[:, None])
    mass = shifted.exp()
    sums = F.pad(mass, (0, -mass.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).sum(dim=2)
    # The older moments were taken around the older peak: shift them, then let them fade.
    older = state.sum_shifted + state.sum_exp * drop.clamp(min=BANNED)
    state.sum_shifted = fade * older + shifted.mul_(mass).sum(dim=1)
    state.sum_exp = fade * state.sum_exp + sums.sum(dim=1)
    state.max = peak
    return mass.to(dtype), sums, fade


def _keep_top(state: SoftmaxState, scores: Tensor, best: Tensor, first_id: int) -> None:
    # Once a canvas settles, no score here displaces another. On other devices the question would
    # cost a wait, and its answer saves little.
    better = best > state.top[:, -1]
    if scores.device.type == "cpu" and not better.any():
        return
    values, ids = scores.topk(min(TOP, scores.shape[1]), dim=1)
    values, ids = torch.cat((state.top, values), 1), torch.cat((state.top_ids, ids + first_id), 1)
    top, order = values.topk(TOP, dim=1)
    # A position that finds none keeps its own: among equals, the merge may choose otherwise.
    state.top = torch.where(better[:, None], top, state.top)
    state.top_ids = torch.where(better[:, None], ids.gather(1, order), state.top_ids)
