"""Draws from the vocabulary by inverse CDF, and the most probable tokens of some positions,
gathered while the vocabulary is read in chunks.

A draw goes in the order of the token ids: first the block, then a token of it.  `MostProbable`
gathers tokens; `draw_and_embed` draws among them and sums their soft embedding; `MoreTop` names
more of them than the softmax kernels keep, and changes no other result of a pass over the
vocabulary.  Knows masses, scores and uniforms; the head knows where they come from, and
`diffusion/` who asks for so few tokens.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from sfumato import ops
from sfumato.ops.gpu import widest_float
from sfumato.ops.online_softmax import BLOCK, TOP, SoftmaxState
from sfumato.weights.formats import QuantizedTensor


def wide(x: Tensor) -> Tensor:
    """In the widest float that the device has."""
    return x.to(widest_float(x.device.type))


def locate(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the draws fall: the block int64 [positions], and how far into its mass, float64
    [positions] in [0, 1]. mass [positions, blocks]: of each block."""
    mass = wide(mass)
    ends = mass.cumsum(dim=1)
    # A uniform next to 1 may round up to the whole mass, past the last token that has any.
    below = torch.nextafter(ends[:, -1], torch.zeros_like(ends[:, -1]))
    target = torch.minimum(uniform.to(ends) * ends[:, -1], below)
    block = torch.searchsorted(ends, target[:, None], right=True).clamp(max=ends.shape[1] - 1)
    inside = target - (ends - mass).gather(1, block)[:, 0]
    return block[:, 0], (inside / mass.gather(1, block)[:, 0]).clamp(0, 1)


def inverse_cdf(scores: Tensor, inside: Tensor) -> Tensor:
    """The first index whose share of the cumulated mass exceeds `inside`: scores [n, c] → int64
    [n]. Relative to their own peak, scores may be the pass's but for rounding."""
    mass = wide((scores - scores.amax(dim=1, keepdim=True)).exp())
    ends = mass.cumsum(dim=1)
    places = torch.searchsorted(ends, (inside * ends[:, -1])[:, None], right=True)[:, 0]
    # Rounding can put the target at or past the end: the last token with any mass is taken.
    last = mass.shape[1] - 1 - (mass > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(places, last)


class BlockMasses:
    """The masses of all blocks of the vocabulary, put in chunk by chunk."""

    def __init__(self, positions: int, chunks: int, chunk: int, device: torch.device) -> None:
        # Allocated before the first chunk: tensors kept between the chunks' buffers would keep the
        # allocator from reusing their memory.
        size = positions, chunks, -(-chunk // BLOCK)
        self._sums = torch.zeros(size, device=device)
        self._peaks = torch.empty(positions, chunks, device=device)

    def put(self, index: int, sums: Tensor, peak: Tensor) -> None:
        """The masses of one chunk [positions, blocks], relative to the peaks [positions]."""
        self._sums[:, index, : sums.shape[1]] = sums
        self._peaks[:, index] = peak

    def locate(self, peak: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """See `locate`; peak [positions]: that of the whole distribution."""
        self._sums *= (self._peaks - peak[:, None]).exp()[..., None]
        return locate(self._sums.flatten(1), uniform)


def block_ids(block: Tensor, chunk: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The ids int64 [positions, BLOCK] of each position's block, int64 [positions], and which of
    them, bool, are in its chunk and in the vocabulary."""
    per_chunk = -(-chunk // BLOCK)
    first = block // per_chunk * chunk
    columns = (block % per_chunk * BLOCK)[:, None] + torch.arange(BLOCK, device=block.device)
    ids = first[:, None] + columns
    return ids, (columns < chunk) & (ids < vocab_size)


class MostProbable:
    """The most probable tokens of the positions that ask for some, gathered chunk by chunk.

    Of equal scores the lowest ids are kept, so that neither chunks nor other positions change the
    result. Scores above the lowest of the best are buffered; when the buffer is full, all but the
    best are dropped. After the first chunk that is one comparison for each score, and rarely more.
    """

    def __init__(self, count: Tensor, chunk: int) -> None:
        """count: int64 [positions], how many tokens, 0 for a position that asks for none;
        chunk: the most scores that are offered at a time."""
        self.which = count.nonzero()[:, 0]  # int64 [n]: the positions that ask for some
        self.others = (count == 0).nonzero()[:, 0]
        self.count = count[self.which]
        self.max_count = int(self.count.max())
        # In the order of their ids; past the last, -inf. Float32 holds what any dtype holds.
        size = (len(self.which), self.max_count + chunk)
        self.scores = torch.full(size, float("-inf"), device=count.device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=count.device)
        self.held = torch.zeros_like(self.count)
        self.lowest = torch.full_like(self.scores[:, 0], float("-inf"))  # of the best

    @classmethod
    def of(cls, count: Tensor | None, chunk: int, vocab_size: int) -> Self | None:
        """Constructs one where any position asks for some tokens: fewer than all."""
        if count is None:
            return None
        count = cls._counted(count, vocab_size)
        return cls(count, chunk) if count.any() else None

    @staticmethod
    def _counted(count: Tensor, vocab_size: int) -> Tensor:
        return count.masked_fill(count >= vocab_size, 0)

    def offer(self, raw: Tensor, first_id: int) -> None:
        """Takes the scores float [positions, m] of the ids first_id, first_id + 1, …, from 0 on and
        in order; only the order of the scores counts."""
        scores = raw if len(self.which) == len(raw) else raw[self.which]
        better = self._best(scores) if first_id == 0 else self._better(scores)
        if int((self.held + _sizes(better)).max()) > self.scores.shape[1]:
            self._condense()
            better = self._better(scores)
        row, column = better.nonzero(as_tuple=True)
        self._put(row, _sizes(better), scores[row, column].float(), column + first_id)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Scores float32 and ids int64 of the best, both [n, most], in the order of the ids; where
        there are fewer, scores of -inf come last."""
        self._condense()
        return self.scores[:, : self.max_count], self.ids[:, : self.max_count]

    def _better(self, scores: Tensor) -> Tensor:
        return scores > self.lowest.to(scores.dtype)[:, None]

    def _best(self, scores: Tensor) -> Tensor:
        """Which scores are each row's `count` best, bool like scores; stores the lowest of them."""
        size = scores.shape[1]
        ranked = scores.topk(min(self.max_count, size), dim=1)[0]
        lowest = ranked.gather(1, (self.count.clamp(max=size) - 1)[:, None])
        self.lowest = lowest[:, 0].float().masked_fill_(self.count > size, float("-inf"))
        above, level = scores > lowest, scores == lowest
        room = self.count - _sizes(above)
        # A banned token has no probability.
        return (above | level & (level.cumsum(dim=1) <= room[:, None])) & (scores > float("-inf"))

    def _condense(self) -> None:
        best = self._best(self.scores)
        row, column = best.nonzero(as_tuple=True)
        scores, ids = self.scores[row, column], self.ids[row, column]
        self.scores.fill_(float("-inf"))
        self.held.zero_()
        self._put(row, _sizes(best), scores, ids)

    def _put(self, row: Tensor, sizes: Tensor, scores: Tensor, ids: Tensor) -> None:
        """Appends entries to their rows: row int64 [m], rising; sizes: how many each row gets."""
        first = self.held - (sizes.cumsum(0) - sizes)
        place = first[row] + torch.arange(len(row), device=row.device)
        self.scores[row, place] = scores
        self.ids[row, place] = ids
        self.held += sizes


def _sizes(mask: Tensor) -> Tensor:
    """How many are true in each row: int64 [n]. Summed in 32 bits, twenty times as fast."""
    return mask.sum(dim=1, dtype=torch.int32).long()


def draw_and_embed(
    scores: Tensor,
    ids: Tensor,
    uniform: Tensor,
    embedding: Tensor | QuantizedTensor,
    dtype: torch.dtype,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """The draw int64 [n], and the soft embedding Σ p · embedding · sqrt(hidden) float32 [n,
    hidden], of the distribution of a few tokens alone: p is the softmax of their scores.

    scores float32 (over temperature, finite) and ids int64 [n, k], of rising ids; uniform float64
    [n] in [0, 1); products are in `dtype`, of no more than `rows` rows of the embedding at a time.
    """
    if len(ids) == 1:  # torch rounds a product of one pair of matrices otherwise than of several
        scores, ids, uniform = (x.expand(2, *x.shape[1:]) for x in (scores, ids, uniform))
        drawn, soft = draw_and_embed(scores, ids, uniform, embedding, dtype, rows)
        return drawn[:1], soft[:1]
    drawn = ids.gather(1, inverse_cdf(scores, uniform)[:, None])[:, 0]
    # The most probable token has weight 1, which no dtype rounds, as it would its probability.
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
    total, weights = weights.sum(dim=1), weights.to(dtype)
    soft = torch.zeros(len(ids), embedding.shape[1], device=ids.device)
    size = max(2, rows // ids.shape[1])  # positions
    for start in range(0, len(ids), size):
        at = slice(min(start, len(ids) - 2), start + size)  # never the last one alone, as above
        soft[at] = 0
        for part, share in zip(ids[at].split(rows, 1), weights[at].split(rows, 1), strict=True):
            soft[at] += (share[:, None] @ ops.embed(part, embedding, dtype))[:, 0].float()
    return drawn, soft / total[:, None] * soft.shape[1] ** 0.5


class MoreTop(MostProbable):
    """The most probable tokens of positions that ask for more than TOP."""

    @staticmethod
    def _counted(count: Tensor, vocab_size: int) -> Tensor:
        count = count.clamp(max=vocab_size)
        return count.masked_fill(count <= TOP, 0)

    def appended(
        self, state: SoftmaxState, scores: Tensor, ids: Tensor, top_ids: Tensor, top_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The kernels' tokens and their probabilities [positions, TOP], and after them the
        gathered `ids` with their `scores` over temperature; zeros at positions that ask for no more
        than TOP."""
        first_ids, first_probs = top_ids[self.which], top_probs[self.which]
        repeated = (ids[..., None] == first_ids[:, None]).any(dim=-1)
        rest = scores.masked_fill(repeated, float("-inf"))
        order = rest.argsort(dim=1, descending=True, stable=True)[:, : self.max_count - TOP]
        peak, total = state.max[self.which, None], state.sum_exp[self.which, None]
        probs = (rest.gather(1, order) - peak).exp() / total
        # Gathered by their products, which the softcap may round into another order.
        probs = torch.minimum(probs, first_probs[:, -1:])
        more_ids = top_ids.new_zeros(len(top_ids), order.shape[1])
        more_probs = top_probs.new_zeros(more_ids.shape)
        more_ids[self.which], more_probs[self.which] = ids.gather(1, order), probs
        return torch.cat((top_ids, more_ids), 1), torch.cat((top_probs, more_probs), 1)
