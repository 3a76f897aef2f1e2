"""The vocabulary head: all that a denoising step needs to know of 262144 scores per position.

`VocabularyHead` is the output layer, mostly the tied embedding: chunk by chunk and softcapped.
One pass over its chunks, with running maxima and sums, gives the argmax, the top few, one drawn
token, the entropy and the soft embedding, exactly unless the caller lets some of the mass go:
`Skip` leaves out all but the few most probable tokens where these hold almost all of the
probability, and so saves the head's second product.  The draws' uniforms, and all policy, come from
`diffusion/`.

The plain pass reads nothing on the host, and its operations do not depend on how many positions
there are.  `skip`, `soft_top_k`, `top`, kept logits and adjusted scores may read on the host, since
their shapes depend on data.  Memory is bounded by the chunk (see `head_bytes`): never [positions,
vocabulary].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import cast

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.model_config import ModelConfig
from sfumato.model.most_probable import (
    BlockMasses,
    MoreTop,
    MostProbable,
    block_ids,
    draw_and_embed,
    inverse_cdf,
)
from sfumato.ops.online_softmax import BANNED, BLOCK, TOP, Bans, SoftmaxState, probs_of
from sfumato.ops.reference import ROWS
from sfumato.ops.registry import operation
from sfumato.weights.formats import QuantizedTensor, Weight

CHUNK = 4096  # vocabulary rows at a time: with their scores, about what a CPU's caches hold

ROWS_AT_A_TIME = 512
"""Rows of the embedding that are measured together: some megabytes in float32."""


@dataclass(frozen=True)
class VocabularyHead:
    """The output layer [vocab, hidden], which is the tied embedding or a weight of its own; a call
    is one pass over it. Soft embeddings have a meaning where it is the embedding.

    softcap: 0 for none. output: the same, cut into `chunk` rows each, in the form in which it is
    multiplied fastest (see `ops.pack`); None where that is the embedding's own.
    rounding: by how much what reads a soft embedding rounds it, relative to its norm; 0 for not at
    all (see `ops.rounding`).
    """

    embedding: Tensor | QuantizedTensor
    softcap: float
    chunk: int = CHUNK
    output: Sequence[Weight] | None = None
    rounding: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def rows(
        self, start: int, stop: int, dtype: torch.dtype, spare: Tensor | None = None
    ) -> Tensor:
        """Rows start..stop of the embedding as a float tensor, maybe in `spare` [chunk, hidden]."""
        room = None if spare is None else spare[: stop - start]
        return ops.dense(self.embedding[start:stop], dtype, room)

    @property
    def _by_bytes(self) -> bool:
        """Whether masses are multiplied by the embedding in int8: where its products with hidden
        states are, and the processor has nothing better."""
        first = self.output[0] if self.output else None
        return ops.packs_columns(self.embedding, first)

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory that `columns` may take for a chunk."""
        shape = min(self.chunk, self.vocab_size), self.embedding.shape[1]
        if self._by_bytes:
            return torch.empty(ops.column_bytes(shape), dtype=torch.uint8)
        return torch.empty(shape, dtype=dtype, device=self.embedding.device)

    def columns(self, start: int, stop: int, dtype: torch.dtype, spare: Tensor) -> Weight:
        """Rows start..stop of the embedding, transposed [hidden, n], as a sum of rows is multiplied
        fastest: a float tensor, or packed; maybe in `spare`, see `room`."""
        if self._by_bytes:
            return ops.pack_columns(cast(QuantizedTensor, self.embedding[start:stop]), spare)
        return self.rows(start, stop, dtype, spare).T

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
        return self.capped(self.raw(hidden, start, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """All softcapped logits, before temperature: float32 [..., vocab]. For tests and samplers
        that cannot do without; its size is what `__call__` avoids."""
        return torch.cat([self.scores(hidden, start) for start, _ in self.chunks()], dim=-1)

    def soft_embedding(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """softmax(logits) @ embedding · sqrt(hidden): [..., vocab] → [..., hidden] in `dtype`."""
        p = logits.softmax(dim=-1, dtype=torch.float32)
        soft = p.new_zeros(*p.shape[:-1], self.embedding.shape[1])
        for start, stop in self.chunks():
            soft += (p[..., start:stop].to(dtype) @ self.rows(start, stop, dtype)).float()
        return (soft * soft.shape[-1] ** 0.5).to(dtype)

    def chunks(self) -> list[tuple[int, int]]:
        """The chunks' bounds."""
        size = self.vocab_size
        return [(a, min(a + self.chunk, size)) for a in range(0, size, self.chunk)]

    def own_scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The softcapped logits of each position's own ids: hidden [n, hidden], ids int64 [n, m],
        of which those past the vocabulary stand for its last → float32 [n, m]."""
        ids = ids.clamp(max=self.vocab_size - 1)
        return self.capped(ops.own_scores(hidden, self.embedding, ids))

    @cached_property
    def longest(self) -> Tensor:
        """The norm of the longest row of the embedding, float32 []: computed once."""
        size = self.vocab_size
        parts = [
            self.rows(start, min(start + ROWS_AT_A_TIME, size), torch.float32).norm(dim=1).amax()
            for start in range(0, size, ROWS_AT_A_TIME)
        ]
        return torch.stack(parts).amax()

    def capped(self, raw: Tensor) -> Tensor:
        """softcap · tanh(raw / softcap), or raw where softcap is 0; float32, maybe in place."""
        if not self.softcap:
            return raw.float()
        return raw.float().mul_(1 / self.softcap).tanh_().mul_(self.softcap)

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
        done: Tensor | None = None,
        embeds: bool | Tensor = True,
    ) -> HeadStats:
        """One pass over the vocabulary.

        hidden [positions, hidden]; temperature float32 [positions], > 0; uniform float64
        [positions] in [0, 1); adjust acts on softcapped logits before the temperature; keep_logits:
        whether of all positions or, bool [positions], of which; skip touches the soft embedding
        alone; soft_top_k int64 [positions]: the draw and the soft embedding are of so many most
        probable tokens, 0 for all; bans: never beside an adjust or kept logits; top int64
        [positions]: how many most probable tokens are named, TOP at least; done bool
        [positions]: those of rows that are done, which kernels may leave out; embeds: False, or
        False in bool [positions], for zeros in place of soft embeddings, where no step comes that
        reads them.
        What is asked for at one position changes no bit at another.
        """
        settings = PassSettings(
            temperature, uniform, adjust, keep_logits, skip, soft_top_k, bans, top, embeds
        )
        if not settings.plain:
            return VocabularyPass(self, hidden, settings).run()
        inputs = hidden, self.embedding, temperature, uniform, self.softcap, bans
        return HeadStats(*vocabulary_pass(*inputs, self.chunk, self.output, done))


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


def sufficient(state: SoftmaxState, skip: Skip, output: VocabularyHead) -> tuple[Tensor, Tensor]:
    """The positions int64 [n] whose TOP most probable tokens suffice after a pass, and Σ mass ·
    embedding of these tokens, float32 [n, hidden], relative to the peak.

    They suffice where they leave out at most the position's share of the probability; for
    AS_ROUNDED, where the share ε that they leave out keeps 2ε · longest at or under `rounding`
    times the norm of Σ p · embedding.  The vector is off by ε · longest at most; the factor 2 is
    what dividing by the mass of these tokens alone would cost.
    """
    mass = (state.top - state.max[:, None]).exp()
    missing = 1 - _sum_of_columns(mass) / state.sum_exp
    # The sum is no longer than `longest`: what leaves out more can never suffice.
    most = torch.where(skip.share == AS_ROUNDED, output.rounding / 2, skip.share)
    which = ((missing <= most) & (skip.share != 0)).nonzero()[:, 0]
    if not len(which):
        return which, state.max.new_zeros(0, output.embedding.shape[1])
    ids, mass = state.top_ids[which], mass[which]
    total = mass.new_zeros(len(which), output.embedding.shape[1])
    for place in range(ids.shape[1]):  # one by one: the sum is of the position's own numbers
        total += mass[:, place, None] * ops.embed(ids[:, place], output.embedding, torch.float32)
    is_free = skip.share[which] > 0
    if not bool(is_free.all()):
        off = 2 * missing[which] * state.sum_exp[which] * output.longest
        is_free |= off <= output.rounding * total.norm(dim=1)
    return which[is_free], total[is_free]


def _sum_of_columns(values: Tensor) -> Tensor:
    """float32 [n, m] → [n], in the order of the columns, however many rows there are."""
    total = values[:, 0].clone()
    for place in range(1, values.shape[1]):
        total += values[:, place]
    return total


@dataclass(frozen=True)
class HeadStats:
    """Results of each position; leading axes are those of the hidden states."""

    argmax: Tensor  # int64 [...]; of equal scores the lowest id
    drawn: Tensor  # int64 [...]; by inverse CDF from the uniform
    entropy: Tensor  # float32 [...], in nats
    top_ids: Tensor  # int64 [..., TOP], most probable first; wider where more were asked for
    top_probs: Tensor  # float32, like top_ids
    soft: Tensor  # [..., hidden]: Σ p · embedding · sqrt(hidden), in the hidden states' dtype
    drawn_probs: Tensor  # float32 [...]: the probabilities of the drawn tokens
    logits: Tensor | None = None  # float32 [..., vocab], processed; only where asked for
    named: Tensor | None = None  # float32 [..., n]: log probabilities of n tokens that were named
    # bool [...]: where the TOP most probable tokens hold what `Skip` asks for; None: not known
    top_suffices: Tensor | None = None

    @property
    def suffices(self) -> Tensor:
        """`top_suffices`, False where it is not known."""
        if self.top_suffices is None:
            return torch.zeros_like(self.argmax, dtype=torch.bool)
        return self.top_suffices

    def __getitem__(self, index: int | slice) -> HeadStats:
        """The statistics of one row, or of some, along the first axis."""
        values = (getattr(self, field.name) for field in fields(self))
        return HeadStats(*(None if v is None else v[index] for v in values))  # type: ignore[arg-type]


PLAIN = "argmax", "drawn", "entropy", "top_ids", "top_probs", "soft", "drawn_probs"
"""Names of the statistics that every position has."""


def statistics(
    state: SoftmaxState,
    drawn: Tensor,
    scores: Tensor,
    soft: Tensor,
    dtype: torch.dtype,
    kept: list[Tensor],
    vocab: int,
) -> HeadStats:
    """The statistics of a pass that has ended: drawn int64 and their scores float32 [positions];
    soft float32 [positions, hidden]: Σ mass · embedding, relative to the peak; dtype: that of the
    soft embedding; kept: the chunks of the logits."""
    logits = torch.cat(kept, 1) if kept else None
    entropy = (state.sum_exp.log() - state.sum_shifted / state.sum_exp).clamp(min=0)
    soft = (soft / state.sum_exp[:, None] * soft.shape[1] ** 0.5).to(dtype)
    named = min(TOP, vocab)
    probs = (state.top[:, :named] - state.max[:, None]).exp() / state.sum_exp[:, None]
    top_ids = state.top_ids[:, :named]
    drawn_probs = probs_of(drawn, scores, state.max, state.sum_exp, top_ids, probs)
    return HeadStats(state.argmax, drawn, entropy, top_ids, probs, soft, drawn_probs, logits)


Adjust = Callable[[Tensor, int], Tensor]
"""(softcapped logits float32 [positions, n], first token id) → the same shape; -inf bans."""


@dataclass(frozen=True)
class PassSettings:
    """What a pass is asked for; see `VocabularyHead.__call__`."""

    temperature: Tensor
    uniform: Tensor
    adjust: Adjust | None = None
    keep_logits: bool | Tensor = False
    skip: Skip | None = None
    soft_top_k: Tensor | None = None
    bans: Bans | None = None
    top: Tensor | None = None
    embeds: bool | Tensor = True

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for but bans."""
        more = self.adjust, self.skip, self.soft_top_k, self.top
        nothing_more = self.keep_logits is False and all(each is None for each in more)
        return nothing_more and self.embeds is True


class VocabularyPass:
    """A pass over the vocabulary for some positions."""

    def __init__(self, output: VocabularyHead, hidden: Tensor, settings: PassSettings) -> None:
        """hidden [positions, hidden]."""
        self.output, self.hidden, self.settings = output, hidden, settings
        self.kept = _kept(settings.keep_logits)
        self.changed = settings.adjust is not None or self.kept is not None
        assert settings.bans is None or not self.changed
        chunk, vocab_size = output.chunk, output.vocab_size
        self.best = MostProbable.of(settings.soft_top_k, chunk, vocab_size)
        self.more = MoreTop.of(settings.top, chunk, vocab_size)
        # Changed scores come softcapped.
        self.softcap = None if self.changed else output.softcap or None
        # Where the output is packed, its products are rounded more coarsely than bfloat16 rounds.
        coarse = output.output is not None and ops.multiplies_bf16(hidden.device)
        self.dtype = torch.bfloat16 if coarse else hidden.dtype

    def run(self) -> HeadStats:
        """The statistics of all positions."""
        output, hidden, device = self.output, self.hidden, self.hidden.device
        temperature, bans = self.settings.temperature, self.settings.bans
        state = SoftmaxState.empty(len(hidden), device)
        soft = SoftSum(hidden, self._summed_at_once())
        masses = BlockMasses(len(hidden), len(output.chunks()), output.chunk, device)
        logits: list[Tensor] = []
        spare = output.room(self.dtype)
        for index, (start, stop) in enumerate(output.chunks()):
            columns = cache(partial(output.columns, start, stop, self.dtype, spare))
            # Packed chunks are multiplied as they are: their columns serve the second product.
            raw = self._raw(start, None if output.output is not None else cast(Tensor, columns()).T)
            if self.kept is not None:
                over = raw[self.kept] / temperature[self.kept, None]
                logits.append(over.clamp(min=BANNED))
            self._offer(raw, start)
            mass, sums, fade = ops.update_softmax(
                state, raw, start, temperature, self.softcap, self.dtype, bans
            )
            del raw  # before masses of some positions are gathered
            soft.add(mass, fade, columns)
            masses.put(index, sums, state.max)
        suffices = self._skip(state, soft, spare)
        drawn = self._draw(*masses.locate(state.max, self.settings.uniform))
        stats = statistics(state, *drawn, soft.sum, hidden.dtype, logits, output.vocab_size)
        stats = replace(stats, top_suffices=suffices)
        if self.best is not None:
            self._narrow(stats, state, self.best)
        return stats if self.more is None else self._name_more(stats, state, self.more)

    def _raw(self, start: int, rows: Tensor | None) -> Tensor:
        """The products of the chunk that begins at `start`; changed scores where they are asked
        for."""
        if not self.changed:
            return self.output.raw(self.hidden, start, rows)
        scores, adjust = self.output.scores(self.hidden, start, rows), self.settings.adjust
        return scores if adjust is None else adjust(scores, start)

    def _offer(self, raw: Tensor, start: int) -> None:
        """Offers a chunk's scores to what gathers the best of them: softcap and temperature keep
        their order."""
        gathering = [each for each in (self.best, self.more) if each is not None]
        if gathering and self.settings.bans is not None:  # in place: the softmax bans the same
            raw.masked_fill_(self.settings.bans.within(start, raw.shape[1]), float("-inf"))
        for each in gathering:
            each.offer(raw, start)

    def _late(self) -> Tensor | None:
        """bool [positions]: whose soft embedding is summed after the pass; None: no position's.
        Under an adjust, which a second sweep would repeat, all are summed within it."""
        skip, adjust = self.settings.skip, self.settings.adjust
        if skip is None or adjust is not None or self.settings.embeds is False:
            return None
        late = skip.waits
        if isinstance(self.settings.embeds, Tensor):
            late = late & self.settings.embeds
        if self.best is not None:
            late = late.clone()
            late[self.best.which] = False
        return late

    def _summed_at_once(self) -> Tensor | None:
        """int64 [n]: whose soft embedding is summed chunk by chunk within the pass; None: that of
        all positions."""
        late, best, embeds = self._late(), self.best, self.settings.embeds
        if late is None and best is None and embeds is True:
            return None
        at_once = torch.ones(len(self.hidden), dtype=torch.bool, device=self.hidden.device)
        at_once &= embeds
        if late is not None:
            at_once &= ~late
        if best is not None:
            at_once[best.which] = False
        which = at_once.nonzero()[:, 0]
        return None if len(which) == len(at_once) else which

    def _skip(self, state: SoftmaxState, soft: SoftSum, spare: Tensor) -> Tensor | None:
        """The soft embedding of the positions that may leave out most tokens: of their most
        probable ones, or in a second sweep of all. Returns bool [positions], where the most
        probable ones suffice; None where that is not asked."""
        skip, late, output = self.settings.skip, self._late(), self.output
        if skip is None or late is None:
            return None
        which, sums = sufficient(state, skip, output)
        suffices = torch.zeros_like(late).index_fill_(0, which, True)
        taken = (late & skip.expected)[which]
        soft.sum[which[taken]] = sums[taken]
        self._sum_late((late & ~(suffices & skip.expected)).nonzero()[:, 0], state, soft, spare)
        return suffices

    def _sum_late(self, which: Tensor, state: SoftmaxState, soft: SoftSum, spare: Tensor) -> None:
        """A second sweep over the vocabulary, for the positions `which` int64 [n] alone."""
        if not len(which):
            return
        output, hidden, bans = self.output, self.hidden[which], self.settings.bans
        temperature, peak = self.settings.temperature[which, None], state.max[which, None]
        for index, (start, stop) in enumerate(output.chunks()):
            columns = output.columns(start, stop, self.dtype, spare)
            packed = output.output
            weight = packed[index] if packed is not None else cast(Tensor, columns).T
            # Products, with ROWS, that do not depend on how many positions there are.
            scores = output.capped(ops.linear(hidden, weight, ROWS))
            scores = (scores / temperature).clamp(min=BANNED)
            if bans is not None:
                scores.masked_fill_(bans.within(start, stop - start)[which], BANNED)
            mass = (scores - peak).exp().to(self.dtype)
            soft.sum.index_add_(0, which, ops.linear(mass, columns, ROWS).float())

    def _draw(self, block: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """The token in whose stretch of its block's mass the share `inside` of it falls, and its
        score; of the positions in `best`, which `_narrow` draws, any."""
        ids, exists = block_ids(block, self.output.chunk, self.output.vocab_size)
        if self.settings.bans is not None:
            exists &= ~self.settings.bans.window(ids[:, 0], BLOCK)
        others = None if self.best is None else self.best.others
        if self.settings.adjust is not None:
            scores = self._adjusted_scores(ids, others)
        elif others is None:
            scores = self.output.own_scores(self.hidden, ids)
        else:
            scores = torch.zeros(ids.shape, device=ids.device)
            scores[others] = self.output.own_scores(self.hidden[others], ids[others])
        scores = (scores / self.settings.temperature[:, None]).clamp(min=BANNED)
        place = inverse_cdf(scores.masked_fill(~exists, float("-inf")), inside)
        return ids[:, 0] + place, scores.gather(1, place[:, None])[:, 0]

    def _adjusted_scores(self, ids: Tensor, others: Tensor | None) -> Tensor:
        """The adjusted scores float32 [positions, BLOCK] of each position's own ids, which are
        those of a block; zeros where `others` is given and a position is not among them.

        A product over fewer positions may round differently, and a top-k of one token would then
        ban that very token: so each chunk's scores are computed again, at all positions.
        """
        chunk = ids[:, 0] // self.output.chunk
        scores = torch.zeros(ids.shape, device=ids.device)
        for index in (chunk if others is None else chunk[others]).unique().tolist():
            start, which = index * self.output.chunk, (chunk == index).nonzero()[:, 0]
            of_chunk = self._raw(start, None)[which]
            columns = (ids[which] - start).clamp(max=of_chunk.shape[1] - 1)
            scores[which] = of_chunk.gather(1, columns)
        return scores

    def _narrow(self, stats: HeadStats, state: SoftmaxState, best: MostProbable) -> None:
        """Replaces the draw and the soft embedding of some positions by those of their most
        probable tokens alone. The probability of the draw stays that among all tokens."""
        scores, ids = best.gathered()
        scores = self._over(scores, best.which).clamp(min=BANNED)
        embedding, chunk = self.output.embedding, self.output.chunk
        for count in best.count.unique().tolist():  # so that each is summed in a shape of its own
            at = (best.count == count).nonzero()[:, 0]
            which, tokens = best.which[at], (scores[at, :count], ids[at, :count])
            uniform = self.settings.uniform[which]
            drawn, soft = draw_and_embed(*tokens, uniform, embedding, self.dtype, chunk)
            stats.drawn[which] = drawn
            is_drawn = tokens[1] == drawn[:, None]
            own = tokens[0].masked_fill(~is_drawn, BANNED).amax(dim=1)
            sums = state.max[which], state.sum_exp[which]
            listed = stats.top_ids[which], stats.top_probs[which]
            stats.drawn_probs[which] = probs_of(drawn, own, *sums, *listed)
            stats.soft[which] = soft.to(stats.soft.dtype)

    def _name_more(self, stats: HeadStats, state: SoftmaxState, more: MoreTop) -> HeadStats:
        """Names more of the most probable tokens."""
        scores, ids = more.gathered()
        scores = self._over(scores, more.which)
        top_ids, top_probs = more.appended(state, scores, ids, stats.top_ids, stats.top_probs)
        return replace(stats, top_ids=top_ids, top_probs=top_probs)

    def _over(self, scores: Tensor, which: Tensor) -> Tensor:
        """Gathered scores [n, m] of the positions `which`, as the distribution has them: over
        temperature; -inf, of no token, stays."""
        if self.softcap is not None:
            empty = scores.isneginf()
            scores = self.output.capped(scores.clone()).masked_fill(empty, float("-inf"))
        return scores / self.settings.temperature[which, None]


def _kept(keep_logits: bool | Tensor) -> Tensor | slice | None:
    """The positions of which the scores are kept, as an index; None for none."""
    if isinstance(keep_logits, bool):
        return slice(None) if keep_logits else None
    which = keep_logits.nonzero()[:, 0]
    return which if len(which) else None


@operation
def vocabulary_pass(
    hidden: Tensor,
    weight: Tensor | QuantizedTensor,
    temperature: Tensor,
    uniform: Tensor,
    softcap: float,
    bans: Bans | None,
    chunk: int,
    packed: Sequence[Weight] | None,
    done: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One pass over the vocabulary of which nothing is asked but bans.

    hidden [positions, hidden], weight [vocab, hidden], temperature float32 and uniform float64
    [positions]; chunk: ids at a time, where no kernel serves; packed: the chunks of the weight as
    they are multiplied; done bool [positions]: those of rows that are done, whose results may be
    any tokens and finite numbers → the fields of `HeadStats` but the logits, in their order.
    """
    # Of all positions: to leave some out would be a shape that depends on data.
    output = VocabularyHead(weight, softcap, chunk, packed)
    stats = VocabularyPass(output, hidden, PassSettings(temperature, uniform, bans=bans)).run()
    return tuple(getattr(stats, name) for name in PLAIN)
