"""The distribution of each position over a vocabulary that is read in chunks, in plain torch.

Knows scores and ids; what they are scores of, and what is done with the state, is the head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.registry import operation

TOP = 8  # how many of a distribution's most probable tokens are kept
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
    """Tokens that positions may not have, in a shape that does not depend on how many there are.

    For each row: ids, and for each id the number of the row's first positions at which the id is
    banned (0: nowhere).  All int64, on the device of the scores.
    """

    ids: Tensor  # [rows, n]: different within a row; ignored where the limit is 0
    limits: Tensor  # [rows, n]
    row: Tensor  # [positions]: each position's row
    place: Tensor  # [positions]: each position's place in its row

    @classmethod
    def of(
        cls,
        limits: Sequence[Mapping[int, int]],
        lengths: Sequence[int],
        device: torch.device,
    ) -> Bans:
        """limits: for each row, the number of first positions at which an id is banned, by id;
        lengths: the number of positions of each row; the positions of the rows are packed."""
        most = max(1, *map(len, limits))
        ids = [[*each, *[0] * (most - len(each))] for each in limits]
        numbers = [[*each.values(), *[0] * (most - len(each))] for each in limits]
        row = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
        place = torch.cat([torch.arange(length) for length in lengths])
        tensors = (torch.tensor(ids), torch.tensor(numbers), row, place)
        return cls(*(tensor.to(device) for tensor in tensors))

    def covers(self, size: int) -> Tensor:
        """bool [positions]: where all ids of a vocabulary are banned."""
        return self._applies().sum(dim=1) >= size

    def within(self, first_id: int, count: int) -> Tensor:
        """bool [positions, count]: which of the ids first_id, first_id + 1, … are banned."""
        limits = _spread(self.ids - first_id, self.limits.int(), count)
        return limits.index_select(0, self.row) > self.place[:, None]

    def window(self, first_ids: Tensor, count: int) -> Tensor:
        """bool [positions, count]: as `within`, of ids that begin at first_ids[position]."""
        columns = self.ids.index_select(0, self.row) - first_ids[:, None]
        return _spread(columns, self._applies().to(torch.uint8), count) > 0

    @cached_property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """first and last int64 [positions], and ids: those of position p are ids[first[p]:last[p]].
        For kernels of the CPU."""
        order = self.limits.argsort(dim=1, descending=True)
        first = self.row * self.ids.shape[1]
        return first, first + self._applies().sum(dim=1), self.ids.gather(1, order).reshape(-1)

    def _applies(self) -> Tensor:
        """bool [positions, n]: which of its row's ids are banned at a position."""
        return self.limits.index_select(0, self.row) > self.place[:, None]


def _spread(columns: Tensor, values: Tensor, count: int) -> Tensor:
    """The highest of the values [rows, n], at least 0, that go to each of `count` columns [rows,
    n]; what goes to others is left out."""
    kept = values.masked_fill((columns < 0) | (columns >= count), 0)
    table = values.new_zeros(len(columns), count)
    return table.scatter_reduce_(1, columns.clamp(0, count - 1), kept, "amax")


def probs_of(
    tokens: Tensor, scores: Tensor, peak: Tensor, total: Tensor, top_ids: Tensor, top_probs: Tensor
) -> Tensor:
    """The probabilities float32 [positions] of one token of each position, int64: where it is among
    the most probable ones, to the bit what stands there, and else no more than the least of these.

    scores float32: of the tokens, over temperature; peak and total: the highest score, and Σ
    e^(score - peak) of all tokens."""
    is_listed = top_ids == tokens[:, None]
    listed = top_probs.masked_fill(~is_listed, 0.0).sum(dim=1)
    other = torch.minimum((scores - peak).exp() / total, top_probs[:, -1])
    return torch.where(is_listed.any(dim=1), listed, other)


@operation
def update_softmax(
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
    return take(state, scored(raw, first_id, temperature, softcap, bans), first_id, dtype)


def scored(
    raw: Tensor, first_id: int, temperature: Tensor, softcap: float | None, bans: Bans | None
) -> Tensor:
    """The scores of `update_softmax`, in memory that may be that of `raw`."""
    scores = raw.float()
    if softcap is not None:
        scores = scores.mul_(1 / softcap).tanh_().mul_(softcap)
    # Clamped after the division: a low temperature would make BANNED infinite again.
    scores = scores.div_(temperature[:, None]).clamp_(min=BANNED)
    if bans is not None:
        scores.masked_fill_(bans.within(first_id, scores.shape[1]), BANNED)
    return scores


def take(
    state: SoftmaxState, scores: Tensor, first_id: int, dtype: torch.dtype, lazy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes scores, which are overwritten, into a state; see `update_softmax`. lazy: looks on the
    host whether any score displaces one of the top, and else sorts none."""
    best, where = scores.max(dim=1)
    better = best > state.top[:, -1]
    if not lazy or better.any():
        _keep_top(state, scores, better, first_id)
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


def _keep_top(state: SoftmaxState, scores: Tensor, better: Tensor, first_id: int) -> None:
    """Merges a chunk's best into the top, at the positions `better`."""
    values, ids = scores.topk(min(TOP, scores.shape[1]), dim=1)
    values, ids = torch.cat((state.top, values), 1), torch.cat((state.top_ids, ids + first_id), 1)
    top, order = values.topk(TOP, dim=1)
    # Other positions keep their top: among equals, the merge may choose otherwise.
    state.top = torch.where(better[:, None], top, state.top)
    state.top_ids = torch.where(better[:, None], ids.gather(1, order), state.top_ids)
