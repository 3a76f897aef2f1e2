"""The vocabulary head: all that a denoising step needs to know of 262144 scores per position.

One pass over chunks of the tied embedding, with running maxima and sums, gives the argmax, the
top few, one drawn token, the entropy and the soft embedding, exactly unless the caller lets some
of the mass go (`approximate.py`).  Memory is bounded by the chunk (see `head_bytes`): never
[positions, vocabulary].
The draws' uniforms, and all policy, come from `diffusion/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.approximate import Limit, Skip, SoftSum
from sfumato.model.draw import BlockMasses, block_ids, inverse_cdf
from sfumato.model.more_top import MoreTop
from sfumato.model.most_probable import MostProbable, narrow
from sfumato.ops.online_softmax import BANNED, BLOCK, TOP, Bans, SoftmaxState
from sfumato.ops.reference import Weight
from sfumato.weights.blocks import QuantizedTensor

CHUNK = 4096  # vocabulary rows at a time: with their scores, about what a CPU's caches hold


Adjust = Callable[[Tensor, int], Tensor]
"""(softcapped logits float32 [positions, n], first token id) → the same shape; -inf bans."""


@dataclass(frozen=True)
class HeadStats:
    """What one pass found at each position; leading axes are those of the hidden states."""

    argmax: Tensor  # int64 [...]; of equal scores the lowest id
    drawn: Tensor  # int64 [...]; by inverse CDF from the uniform
    entropy: Tensor  # float32 [...], in nats
    top_ids: Tensor  # int64 [..., TOP], most probable first; wider where more were asked for
    top_probs: Tensor  # float32, like top_ids
    soft: Tensor  # [..., hidden]: Σ p · embedding · sqrt(hidden), in the hidden states' dtype
    logits: Tensor | None = None  # float32 [..., vocab], processed; only where asked for

    def __getitem__(self, index: int | slice) -> HeadStats:
        """The statistics of one row, or of some, along the first axis."""
        values = (getattr(self, field.name) for field in fields(self))
        return HeadStats(*(None if v is None else v[index] for v in values))  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabularyHead:
    """The tied embedding [vocab, hidden], read as output layer.

    output: the same, cut into `chunk` rows each, in the form in which it is multiplied fastest
    (see `ops.pack`); None where that is the embedding's own.
    """

    embedding: Tensor | QuantizedTensor
    softcap: float
    chunk: int = CHUNK
    output: Sequence[Weight] | None = None

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def rows(
        self, start: int, stop: int, dtype: torch.dtype, spare: Tensor | None = None
    ) -> Tensor:
        """Rows start..stop of the embedding as a float tensor, maybe in `spare` [chunk, hidden]."""
        room = None if spare is None else spare[: stop - start]
        return ops.dense(self.embedding[start:stop], dtype, room)

    def raw(self, hidden: Tensor, start: int, rows: Tensor | None = None) -> Tensor:
        """The products [..., n] of hidden [..., hidden] with the chunk that begins at `start`,
        in the dtype in which they come; rows: the chunk, where the caller has it already."""
        if self.output is not None:
            return ops.linear(hidden, self.output[start // self.chunk])
        if rows is None:
            rows = self.rows(start, min(start + self.chunk, self.vocab_size), hidden.dtype)
        return ops.linear(hidden, rows)

    def scores(self, hidden: Tensor, start: int, rows: Tensor | None = None) -> Tensor:
        """Softcapped logits float32 [..., n] of the chunk that begins at `start`."""
        return self._capped(self.raw(hidden, start, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """All softcapped logits, before temperature: float32 [..., vocab]. For tests and samplers
        that cannot do without; its size is what `__call__` avoids."""
        return torch.cat([self.scores(hidden, start) for start, _ in self.spans()], dim=-1)

    def soft_embedding(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """softmax(logits) @ embedding · sqrt(hidden): [..., vocab] → [..., hidden] in `dtype`."""
        p = logits.softmax(dim=-1, dtype=torch.float32)
        soft = p.new_zeros(*p.shape[:-1], self.embedding.shape[1])
        for start, stop in self.spans():
            soft += (p[..., start:stop].to(dtype) @ self.rows(start, stop, dtype)).float()
        return (soft * soft.shape[-1] ** 0.5).to(dtype)

    def spans(self) -> list[tuple[int, int]]:
        """The chunks' bounds."""
        size = self.vocab_size
        return [(a, min(a + self.chunk, size)) for a in range(0, size, self.chunk)]

    def __call__(
        self,
        hidden: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        adjust: Adjust | None = None,
        keep_logits: bool | Tensor = False,
        skip: Skip | None = None,
        soft_top_k: Tensor | None = None,
        bans: Bans | None = None,
        top: Tensor | None = None,
    ) -> HeadStats:
        """One pass over the vocabulary.

        hidden [positions, hidden]; temperature float32 [positions], > 0; uniform float64
        [positions] in [0, 1); adjust acts on softcapped logits before the temperature; keep_logits:
        whether of all positions or, bool [positions], of which; skip touches the soft embedding
        alone; soft_top_k int64 [positions]: the draw and the soft embedding are of so many most
        probable tokens, 0 for all; bans: never beside an adjust or kept logits; top int64
        [positions]: how many most probable tokens are named, TOP at least.
        What is asked for at one position changes no bit at another.
        """
        keep = _kept(keep_logits)
        assert bans is None or (adjust is None and keep is None)
        best = MostProbable.of(soft_top_k, self.chunk, self.vocab_size)
        more = MoreTop.of(top, self.chunk, self.vocab_size)
        changed = adjust is not None or keep is not None
        softcap = None if changed else self.softcap  # else the scores come softcapped
        state = SoftmaxState.empty(len(hidden), hidden.device)
        limit = self._limit(skip, best, hidden, temperature, adjust is None, bans)
        soft = SoftSum(hidden, limit)
        masses = BlockMasses(len(hidden), len(self.spans()), self.chunk, hidden.device)
        kept: list[Tensor] = []
        mass_dtype = self._mass_dtype(hidden)
        spare = hidden.new_empty(self.chunk, hidden.shape[1], dtype=mass_dtype)
        for index, (start, stop) in enumerate(self.spans()):
            rows = cache(partial(self.rows, start, stop, mass_dtype, spare))
            # Packed chunks are multiplied as they are: their rows serve the second product alone.
            first_rows = None if self.output is not None else rows()
            if changed:
                raw = self._adjusted(hidden, start, first_rows, adjust)
            else:
                raw = self.raw(hidden, start, first_rows)
            if keep is not None:
                kept.append((raw[keep] / temperature[keep, None]).clamp(min=BANNED))
            _offer(raw, start, bans, best, more)
            mass, sums, fade = ops.update_softmax(
                state, raw, start, temperature, softcap, mass_dtype, bans
            )
            soft.add(state, mass, sums, fade, rows)
            masses.put(index, sums, state.max)
        block, inside = masses.locate(state.max, uniform)
        drawn = self._draw(hidden, temperature, adjust, bans, block, inside, best)
        stats = _statistics(state, drawn, soft.sum, hidden.dtype, kept, self.vocab_size)
        if best is not None:
            self._narrow(stats, best, temperature, uniform, softcap, mass_dtype)
        return stats if more is None else self._name_more(stats, state, more, temperature, softcap)

    def _name_more(
        self,
        stats: HeadStats,
        state: SoftmaxState,
        more: MoreTop,
        temperature: Tensor,
        softcap: float | None,
    ) -> HeadStats:
        scores, ids = more.found()
        scores = self._over(scores, softcap, temperature[more.which])
        top_ids, top_probs = more.behind(state, scores, ids, stats.top_ids, stats.top_probs)
        return replace(stats, top_ids=top_ids, top_probs=top_probs)

    def _limit(
        self,
        skip: Skip | None,
        best: MostProbable | None,
        hidden: Tensor,
        temperature: Tensor,
        guessed: bool,
        bans: Bans | None,
    ) -> Limit | None:
        """Which chunks are left out of the soft embedding; None: none is, at any position."""
        if skip is None and best is None:
            return None
        share = torch.zeros_like(temperature) if skip is None else skip.share
        some = share > 0
        if best is not None:
            some[best.which] = True
        floor = torch.full_like(temperature, BANNED)
        if skip is not None and guessed:  # an adjust may have banned the guess
            rows = ops.embed(skip.guess, self.embedding, hidden.dtype)
            raw = (hidden.float() * rows.float()).sum(dim=1)
            floor = (raw / self.softcap).tanh() * self.softcap / temperature
            if bans is not None:
                floor = floor.masked_fill(bans.contain(skip.guess), BANNED)
        log_share = share.log() - math.log(len(self.spans()))
        log_share[~some] = float("inf")
        if best is not None:
            log_share[best.which] = float("inf")
        return Limit((~some).nonzero()[:, 0], log_share, floor)

    def _narrow(
        self,
        stats: HeadStats,
        best: MostProbable,
        temperature: Tensor,
        uniform: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        """Puts draw and soft embedding of the most probable tokens alone in the place of those that
        the statistics have."""
        scores, ids = best.found()
        scores = self._over(scores, softcap, temperature[best.which]).clamp(min=BANNED)
        for count in best.count.unique().tolist():  # so that none is summed with another's many
            at = (best.count == count).nonzero()[:, 0]
            which, few = best.which[at], (scores[at, :count], ids[at, :count])
            drawn, soft = narrow(*few, uniform[which], self.embedding, dtype, self.chunk)
            stats.drawn[which] = drawn
            stats.soft[which] = soft.to(stats.soft.dtype)

    def _over(self, scores: Tensor, softcap: float | None, temperature: Tensor) -> Tensor:
        """Gathered scores [n, m] as the distribution has them; -inf, of no token, stays."""
        capped = scores
        if softcap is not None:
            capped = self._capped(scores.clone()).masked_fill(scores.isneginf(), float("-inf"))
        return capped / temperature[:, None]

    def _mass_dtype(self, hidden: Tensor) -> torch.dtype:
        # Where the output is packed, its products are rounded more coarsely than bfloat16 rounds.
        packed = self.output is not None and ops.multiplies_bf16(hidden.device)
        return torch.bfloat16 if packed else hidden.dtype

    def _adjusted(
        self, hidden: Tensor, start: int, rows: Tensor | None, adjust: Adjust | None
    ) -> Tensor:
        scores = self.scores(hidden, start, rows)
        return scores if adjust is None else adjust(scores, start)

    def _draw(
        self,
        hidden: Tensor,
        temperature: Tensor,
        adjust: Adjust | None,
        bans: Bans | None,
        block: Tensor,
        inside: Tensor,
        best: MostProbable | None,
    ) -> Tensor:
        """The token in whose stretch of its block's mass the share `inside` of it falls; of the
        positions in `best`, which are drawn otherwise, any."""
        ids, exists = block_ids(block, self.chunk, self.vocab_size)
        if bans is not None:
            exists &= ~bans.window(ids[:, 0], BLOCK)
        others = None if best is None else best.others
        if adjust is not None:
            scores = self._adjusted_scores(hidden, ids, adjust, others)
        elif others is None:
            scores = self._own_scores(hidden, ids)
        else:
            scores = temperature.new_zeros(ids.shape)
            scores[others] = self._own_scores(hidden[others], ids[others])
        scores = (scores / temperature[:, None]).clamp(min=BANNED)
        return ids[:, 0] + inverse_cdf(scores.masked_fill(~exists, float("-inf")), inside)

    def _adjusted_scores(
        self, hidden: Tensor, ids: Tensor, adjust: Adjust, others: Tensor | None
    ) -> Tensor:
        """The adjusted scores float32 [positions, BLOCK] of each position's own ids, which are
        those of a block; zeros where `others` is given and a position is not among them.

        A product over fewer positions may round differently, and a top-k of one token would then
        ban that very token: so each chunk's scores are computed again, at all positions.
        """
        chunk = ids[:, 0] // self.chunk
        scores = torch.zeros(ids.shape, device=ids.device)
        for index in (chunk if others is None else chunk[others]).unique().tolist():
            start, which = index * self.chunk, (chunk == index).nonzero()[:, 0]
            of_chunk = self._adjusted(hidden, start, None, adjust)[which]
            columns = (ids[which] - start).clamp(max=of_chunk.shape[1] - 1)
            scores[which] = of_chunk.gather(1, columns)
        return scores

    def _own_scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Of each position its own ids' softcapped logits: hidden [n, hidden], ids int64 [n, m],
        of which those past the vocabulary stand for its last → float32 [n, m]."""
        ids = ids.clamp(max=self.vocab_size - 1)
        return self._capped(ops.own_scores(hidden, self.embedding, ids))

    def _capped(self, raw: Tensor) -> Tensor:
        return raw.float().mul_(1 / self.softcap).tanh_().mul_(self.softcap)


def _kept(keep_logits: bool | Tensor) -> Tensor | slice | None:
    """Of which positions the scores are kept, as an index; None for none."""
    if isinstance(keep_logits, bool):
        return slice(None) if keep_logits else None
    which = keep_logits.nonzero()[:, 0]
    return which if len(which) else None


def _offer(
    raw: Tensor, start: int, bans: Bans | None, *gathering: MostProbable | MoreTop | None
) -> None:
    """Shows a chunk's scores to those that gather the best of them: softcap and temperature leave
    the order as it is."""
    some = [each for each in gathering if each is not None]
    if some and bans is not None:  # in place: `update` bans the same
        raw.masked_fill_(bans.within(start, raw.shape[1]), float("-inf"))
    for each in some:
        each.offer(raw, start)


def _statistics(
    state: SoftmaxState,
    drawn: Tensor,
    soft: Tensor,
    dtype: torch.dtype,
    kept: list[Tensor],
    vocab: int,
) -> HeadStats:
    logits = torch.cat(kept, 1) if kept else None
    entropy = (state.sum_exp.log() - state.sum_shifted / state.sum_exp).clamp(min=0)
    soft = (soft / state.sum_exp[:, None] * soft.shape[1] ** 0.5).to(dtype)
    few = min(TOP, vocab)
    probs = (state.top[:, :few] - state.max[:, None]).exp() / state.sum_exp[:, None]
    return HeadStats(state.argmax, drawn, entropy, state.top_ids[:, :few], probs, soft, logits)
