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

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.approximate import Likeliest, Limit, Skip, narrow
from sfumato.model.config import ModelConfig
from sfumato.model.draw import inverse_cdf, locate
from sfumato.model.more_top import MoreTop
from sfumato.ops.online_softmax import BANNED, BLOCK, TOP, Bans, SoftmaxState
from sfumato.ops.reference import ROWS, Weight
from sfumato.weights.blocks import QuantizedTensor

CHUNK = 4096  # vocabulary rows at a time: with their scores, about what a CPU's caches hold


def head_bytes(
    config: ModelConfig, dtype: torch.dtype, rows: int = 1, compiled: bool = False
) -> int:
    """The most that the pass of `rows` canvases holds at a time, but for what processors of logits
    copy: the masses of the draw's blocks, and beside them first four float32 buffers of a chunk's
    scores (raw, in work, shifted, exponential) and the chunk of the embedding, in `dtype` and,
    while it is dequantized, in float32; then, for the draw, the masses three times in float64, and
    the chunk in `dtype`.

    compiled: by the compiled operations, which have two buffers of scores, and no float32 chunk."""
    chunk, positions = min(CHUNK, config.vocab_size), rows * config.canvas_length
    scores = (2 if compiled else 4) * positions * chunk
    embedding = chunk * config.hidden_size
    masses = positions * -(-config.vocab_size // BLOCK)
    first = (scores if compiled else scores + embedding) * torch.float32.itemsize
    then = 3 * masses * torch.float64.itemsize
    return masses * torch.float32.itemsize + embedding * dtype.itemsize + max(first, then)


Adjust = Callable[[Tensor, int], Tensor]
"""(softcapped logits float32 [positions, n], first token id) → the same shape; -inf bans."""


@dataclass(frozen=True)
class HeadStats:
    """What one pass found at each position; leading axes are those of the hidden states."""

    argmax: Tensor  # int64 [...]; of equal scores the lowest id
    drawn: Tensor  # int64 [...]; by inverse CDF from the uniform
    entropy: Tensor  # float32 [...], in nats
    top_ids: Tensor  # int64 [..., TOP], likeliest first; wider where more were asked for
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
        alone; soft_top_k int64 [positions]: how many of its likeliest tokens a position is drawn
        from and has its soft embedding of, 0 for all; bans: never beside an adjust or kept logits;
        top int64 [positions]: how many of its most probable tokens a position names, TOP at least.
        What is asked for at one position changes no bit at another.
        """
        keep = _kept(keep_logits)
        assert bans is None or (adjust is None and keep is None)
        best = self._likeliest(soft_top_k)
        state = SoftmaxState.empty(len(hidden), hidden.device)
        soft = torch.zeros_like(hidden, dtype=torch.float32)
        dtype = self._mass_dtype(hidden)
        spare = hidden.new_empty(self.chunk, hidden.shape[1], dtype=dtype)
        # Tables made beforehand: what is kept between the chunks' buffers would keep their memory.
        sums, peaks = self._tables(state)
        kept = []
        exact, limit = self._limit(skip, best, hidden, temperature, adjust is None, bans)
        more = MoreTop.of(top, self.chunk, self.vocab_size)
        for index, (start, stop) in enumerate(self.spans()):
            # Packed chunks are multiplied as they are: their rows serve the second product alone.
            rows = None if self.output is not None else self.rows(start, stop, dtype, spare)
            if adjust is None and keep is None:
                raw, cap = self.raw(hidden, start, rows), self.softcap
            else:
                raw, cap = self._adjusted(hidden, start, rows, adjust), None
            if keep is not None:
                kept.append((raw[keep] / temperature[keep, None]).clamp(min=BANNED))
            _offer(raw, start, bans, best, more)
            mass, here, fade = ops.update_softmax(state, raw, start, temperature, cap, dtype, bans)
            soft.mul_(fade[:, None])
            which = () if limit is None else limit.exceeded(state, here)
            if exact is None or len(exact) or len(which):
                rows = self.rows(start, stop, dtype, spare) if rows is None else rows
                _add_products(soft, mass, rows, exact, which)
            sums[:, index, : here.shape[1]] = here
            peaks[:, index] = state.max
        sums *= (peaks - state.max[:, None]).exp()[..., None]
        block, inside = locate(sums.flatten(1), uniform)
        drawn = self._draw(hidden, temperature, adjust, bans, block, inside, best)
        stats = _statistics(state, drawn, soft, hidden.dtype, kept, self.vocab_size)
        if best is not None:
            self._narrow(stats, best, temperature, uniform, cap, dtype)
        return stats if more is None else self._name_more(stats, state, more, temperature, cap)

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

    def _tables(self, state: SoftmaxState) -> tuple[Tensor, Tensor]:
        """The masses of blocks [positions, chunks, blocks of a chunk], none so far, and the peaks
        [positions, chunks] that they are relative to."""
        chunks = len(state.max), len(self.spans())
        sums = state.max.new_zeros(*chunks, -(-self.chunk // BLOCK))
        return sums, state.max.new_empty(chunks)

    def _likeliest(self, count: Tensor | None) -> Likeliest | None:
        if count is None:
            return None
        few = count.masked_fill(count >= self.vocab_size, 0)  # that many are all
        return Likeliest(few, self.chunk) if few.any() else None

    def _limit(
        self,
        skip: Skip | None,
        best: Likeliest | None,
        hidden: Tensor,
        temperature: Tensor,
        guessed: bool,
        bans: Bans | None,
    ) -> tuple[Tensor | None, Limit | None]:
        """The positions int64 [n] that need every chunk, None for all; and of the others, when."""
        if skip is None and best is None:
            return None, None
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
        return (~some).nonzero()[:, 0], Limit(log_share, floor)

    def _narrow(
        self,
        stats: HeadStats,
        best: Likeliest,
        temperature: Tensor,
        uniform: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        """Puts draw and soft embedding of the likeliest tokens alone in the place of those that
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
        best: Likeliest | None,
    ) -> Tensor:
        """The token in whose stretch of its block's mass the share `inside` of it falls; of the
        positions in `best`, which are drawn otherwise, any."""
        per_chunk = -(-self.chunk // BLOCK)
        chunk, place = block // per_chunk, block % per_chunk
        ids = torch.arange(BLOCK, device=block.device) + place[:, None] * BLOCK  # in the chunk
        there = (ids < self.chunk) & (ids + chunk[:, None] * self.chunk < self.vocab_size)
        if bans is not None:
            there &= ~bans.window(chunk * self.chunk + place * BLOCK, BLOCK)
        drawn = torch.zeros_like(block)
        wanted = torch.arange(len(block), device=block.device) if best is None else best.others
        parts = [wanted] if adjust is None else self._same_chunk(chunk, wanted)
        for which in parts:
            start, own = chunk[which] * self.chunk, ids[which]
            if adjust is None:
                scores = self._own_scores(hidden[which], start[:, None] + own)
            else:
                # A product over fewer positions may round differently, and a top-k of one token
                # would then ban that very token: only the same product will do.
                scores = self._adjusted(hidden, int(start[0]), None, adjust)[which]
                scores = scores.gather(1, own.clamp(max=scores.shape[1] - 1))
            scores = (scores / temperature[which, None]).clamp(min=BANNED)
            scores = scores.masked_fill(~there[which], float("-inf"))
            drawn[which] = start + own[:, 0] + inverse_cdf(scores, inside[which])
        return drawn

    def _same_chunk(self, chunk: Tensor, wanted: Tensor) -> list[Tensor]:
        """Positions whose blocks lie in one chunk."""
        chunk = chunk[wanted]
        return [wanted[chunk == index] for index in chunk.unique()]

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
    raw: Tensor, start: int, bans: Bans | None, *gathering: Likeliest | MoreTop | None
) -> None:
    """Shows a chunk's scores to those that gather the best of them: softcap and temperature leave
    the order as it is."""
    some = [each for each in gathering if each is not None]
    if some and bans is not None:  # in place: `update` bans the same
        raw.masked_fill_(bans.within(start, raw.shape[1]), float("-inf"))
    for each in some:
        each.offer(raw, start)


def _add_products(
    soft: Tensor, mass: Tensor, rows: Tensor, exact: Tensor | None, which: Tensor | tuple[()]
) -> None:
    """Adds mass @ rows to soft [positions, hidden], at the positions `exact` (None: all), and at
    those of `which` by products of fewer rows, since they are meant to be few."""
    if exact is None:
        soft.add_(ops.linear(mass, rows.T))
    elif len(exact):
        soft.index_add_(0, exact, ops.linear(mass[exact], rows.T).float())
    if isinstance(which, Tensor) and len(which):
        soft.index_add_(0, which, ops.linear(mass[which], rows.T, ROWS).float())


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
