"""The vocabulary pass of one step: every row under its own sampling settings.

Rows are scored in three groups at most.  Plain rows go through the compiled pass, and so do those
that only ban tokens; elsewhere than on a CPU nothing in their pass reads a value on the host.  Rows
that ask for fewer tokens in their soft embedding or for more named tokens are a group of their own,
and so are rows whose scores are changed otherwise, or kept: what these two groups do may depend on
data.  On a CPU `soft_skip` is a part of the plain pass, elsewhere of the second group.  A row's
statistics do not depend on which rows it is denoised with, to the last bit on a CPU, and within a
group nothing that one row asks for changes another's numbers.

The positions at which a grammar leaves only some tokens, one of a row at most, are scored again by
themselves, so that a row's other positions have the numbers that they would have without the mask,
and no other row is slower by more than one position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.sampler import (
    SAMPLERS,
    Banned,
    LogitBias,
    Never,
    SettledToEnd,
    StableAndConfident,
    banned_by,
)
from sfumato.model.devices import to_device
from sfumato.model.head import AS_ROUNDED, PLAIN, Adjust, HeadStats, Skip, VocabularyHead
from sfumato.model.scores import named_log_probs
from sfumato.model.truncate import cutoffs
from sfumato.ops.gpu import widest_float
from sfumato.ops.online_softmax import TOP, Bans

LATE_AT_MOST = 0.125
"""Share of a row's positions: where not more are to be summed in full, they wait for the end of the
pass. A sweep of their own then costs less than their part in the pass's second product does, whose
time hardly falls with the number of positions; more of them are summed in it, and none is left
out."""


def reads_soft(canvas: Canvas) -> bool:
    """Whether anything may read the soft embedding of the step to come. Nothing does where it is
    the canvas's last one, or the row has no self-conditioning, and the rules are built-in ones,
    which do not look at it."""
    config = canvas.config
    stops = StableAndConfident, SettledToEnd, Never
    known = type(config.sampler) in SAMPLERS.values() and type(config.stopping) in stops
    is_unread = canvas.is_at_last_step or not config.self_conditioning
    return not (known and canvas.guidance is None and is_unread)


def embedded(canvases: Sequence[Canvas], device: torch.device) -> bool | Tensor:
    """The packed positions of which a pass gives soft embeddings: True for all, False for none, or
    bool [positions]. Elsewhere than on a CPU a kernel does the whole pass, whatever is read of
    it."""
    reading = [device.type != "cpu" or reads_soft(canvas) for canvas in canvases]
    if all(reading) or not any(reading):
        return all(reading)
    return spread(canvases, reading)


def skip_of(
    head: VocabularyHead, canvases: Sequence[Canvas], expected: Tensor | None, device: torch.device
) -> Skip | None:
    """What the rows of a group may leave out of their soft embeddings; None for nothing. expected:
    as in `score_rows`, of their positions."""
    shares = [_share(head, canvas, device) for canvas in canvases]
    if expected is None or not any(shares):
        return None
    late = torch.zeros_like(expected)
    for canvas, at in zip(canvases, slices_of(canvases), strict=True):
        # Of the row alone, so that its arithmetic does not depend on other rows.
        late[at] = (~expected[at]).sum() <= canvas.length * LATE_AT_MOST
    return Skip(spread(canvases, shares).to(device), expected, late)


def _share(head: VocabularyHead, canvas: Canvas, device: torch.device) -> float:
    """The share that a row may leave out; see `Skip`."""
    config = canvas.config
    if config.soft_skip is not None:
        return float(config.soft_skip)
    hides = head.rounding > 0 and device.type == "cpu" and config.soft_top_k is None
    return AS_ROUNDED if hides else 0.0


def slices_of(canvases: Sequence[Canvas]) -> list[slice]:
    ends = list(accumulate(canvas.length for canvas in canvases))
    return [slice(end - c.length, end) for end, c in zip(ends, canvases, strict=True)]


def spread(canvases: Sequence[Canvas], values: Sequence[float]) -> Tensor:
    """One value a row → one a position."""
    return torch.cat([torch.full((c.length,), v) for c, v in zip(canvases, values, strict=True)])


Kind = Literal["plain", "approximate", "adjusted"]
"""plain: nothing but bans; approximate: a soft embedding and draw of less than all tokens, or more
named tokens; adjusted: scores changed otherwise, or kept."""


@dataclass(frozen=True)
class ScoringGroup:
    """Rows that one pass over the vocabulary serves."""

    kind: Kind
    rows: tuple[int, ...]
    positions: Tensor | None  # int64: their positions among all, on the device; None: all
    bans: Bans | None
    vocab_size: int

    @cached_property
    def covered(self) -> Tensor | None:
        """bool [their positions]: where every token is banned; None for nowhere."""
        return None if self.bans is None else self.bans.covers(self.vocab_size)


@dataclass(frozen=True)
class Scoring:
    """How rows are grouped: the same at every step of the same rows."""

    groups: tuple[ScoringGroup, ...]
    restore: Tensor | None = None  # int64 [positions]: from the groups' order to the rows'
    starts: tuple[int, ...] = ()  # of each row: its first packed position

    @classmethod
    def of(
        cls,
        canvases: Sequence[Canvas],
        vocab_size: int,
        device: torch.device,
        widths: Sequence[int] | None = None,
    ) -> Scoring:
        """widths: packed positions of each row, of which the first ones are its canvas's; None: no
        more than these."""
        widths = [canvas.length for canvas in canvases] if widths is None else widths
        starts = list(accumulate(widths, initial=0))
        kinds = [kind_of(canvas) for canvas in canvases]
        groups: list[ScoringGroup] = []
        order: list[Tensor] = []
        for kind in get_args(Kind):
            rows = tuple(i for i, other in enumerate(kinds) if other == kind)
            if not rows:
                continue
            members = [canvases[i] for i in rows]
            limits = [] if kind == "adjusted" else ban_limits(members, vocab_size)
            lengths = [canvas.length for canvas in members]
            bans = Bans.of(limits, lengths, device) if any(limits) else None
            # Statistics beyond a canvas are not read: those positions need not be left out.
            all_rows = kind == "plain" and bans is None and len(rows) == len(canvases)
            if all_rows or sum(lengths) == starts[-1]:
                return cls((ScoringGroup(kind, rows, None, bans, vocab_size),), None, tuple(starts))
            places = torch.cat([torch.arange(canvases[i].length) + starts[i] for i in rows])
            order.append(places)
            groups.append(ScoringGroup(kind, rows, places.to(device), bans, vocab_size))
        restore = torch.zeros(starts[-1], dtype=torch.int64)
        together = torch.cat(order)
        restore[together] = torch.arange(len(together))
        return cls(tuple(groups), restore.to(device), tuple(starts))

    @classmethod
    def plain(cls, vocab_size: int, bans: Bans | None = None) -> Scoring:
        """One group of all positions, whose rows ask for nothing but bans."""
        return cls((ScoringGroup("plain", (), None, bans, vocab_size),))


def score(
    head: VocabularyHead,
    hidden: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    scoring: Scoring,
    canvases: Sequence[Canvas] = (),
    expected: Tensor | None = None,
    done: Tensor | None = None,
) -> tuple[HeadStats, dict[int, HeadStats]]:
    """The statistics of all positions, with TOP named tokens; and by row, complete, those of rows
    that asked for more tokens or for their scores. temperature float32 and uniforms float64
    [positions]; canvases: of the rows of `scoring`; expected bool [positions]: where the step
    before found that the top tokens suffice (see `Skip`), None for nowhere; done bool [positions]:
    those of rows that no step changes, None where they are not known.

    The entropy is infinite where every token is banned: `Canvas.check_entropy` says so.
    """
    embeds = embedded(canvases, hidden.device)
    passes: list[HeadStats] = []
    extra: dict[int, HeadStats] = {}
    for group in scoring.groups:
        given: tuple[Any, ...] = hidden, temperature, uniforms, expected, embeds, done
        if (at := group.positions) is not None:
            given = tuple(each[at] if isinstance(each, Tensor) else each for each in given)
        *inputs, presumed, read, left_out = given
        members = [canvases[i] for i in group.rows]
        banned: Tensor | None
        if group.kind == "adjusted":
            stats, banned = _score_adjusted(head, members, *inputs)
        else:
            skip = skip_of(head, members, presumed, hidden.device)
            settings = {} if group.kind == "plain" else _settings(members, hidden.device)
            settings |= {"skip": skip, "bans": group.bans, "embeds": read, "done": left_out}
            stats, banned = head(*inputs, **settings), group.covered
        if banned is not None:
            stats = replace(stats, entropy=stats.entropy.masked_fill(banned, float("inf")))
        if group.kind != "plain":
            own = _by_row(head, members, stats, *inputs[:2])
            rows = zip(group.rows, own, strict=True)
            extra |= {i: row for i, row in rows if _has_more(row)}
        passes.append(replace(_first_top(stats, TOP), logits=None))
    stats = passes[0]
    if scoring.restore is not None:
        stats = _joined_stats(passes, scoring.restore)
    masked = _positions(canvases, scoring.starts)
    if masked:
        extra = _score_masked(head, hidden, masked, temperature, uniforms, stats, extra)
    return stats, extra


def _joined_stats(passes: Sequence[HeadStats], restore: Tensor) -> HeadStats:
    """The statistics of several passes as one; restore int64 [positions]: in which order."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, restore)

    merged = HeadStats(*(join([getattr(stats, name) for stats in passes]) for name in PLAIN))
    if all(stats.top_suffices is None for stats in passes):
        return merged
    return replace(merged, top_suffices=join([stats.suffices for stats in passes]))


def kind_of(canvas: Canvas) -> Kind:
    """What a row asks for beside the plain distribution."""
    if _cuts(canvas) or _needs_logits(canvas) or _bans(canvas) is None:
        return "adjusted"
    config = canvas.config
    skips = config.soft_skip and canvas.device.type != "cpu"
    names_more = (config.top_tokens or 0) > TOP or config.named_tokens
    return "approximate" if skips or names_more or config.soft_top_k is not None else "plain"


def _cuts(canvas: Canvas) -> bool:
    """Whether a row asks for top-k or top-p; a top-p of 1 leaves all."""
    top_p = canvas.config.top_p
    return bool(canvas.config.top_k) or (top_p is not None and top_p < 1)


def _needs_logits(canvas: Canvas) -> bool:
    rules = (canvas.config.sampler, canvas.config.stopping)
    return any(getattr(rule, "needs_logits", False) for rule in rules)


def _has_more(stats: HeadStats) -> bool:
    return stats.logits is not None or stats.named is not None or stats.top_ids.shape[1] > TOP


def _first_top(stats: HeadStats, count: int) -> HeadStats:
    if stats.top_ids.shape[1] <= count:
        return stats
    return replace(stats, top_ids=stats.top_ids[:, :count], top_probs=stats.top_probs[:, :count])


def _by_row(
    head: VocabularyHead,
    canvases: Sequence[Canvas],
    stats: HeadStats,
    hidden: Tensor,
    temperature: Tensor,
) -> list[HeadStats]:
    """Each row's part of a group's statistics: with as many of its most probable tokens as it asked
    for, with its scores if it asked for them, and with the log probabilities of the tokens that it
    names, of which those that are banned have none."""
    rows = []
    wanting = [canvas.length for canvas in canvases if _needs_logits(canvas)]
    logits = iter(() if stats.logits is None else stats.logits.split(wanting))
    stats = replace(stats, logits=None)
    for canvas, at in zip(canvases, slices_of(canvases), strict=True):
        row = _first_top(stats[at], max(TOP, canvas.config.top_tokens or 0))
        if _needs_logits(canvas):
            row = replace(row, logits=next(logits))
        if ids := canvas.config.named_tokens:
            named = named_log_probs(head, hidden[at], temperature[at], row, ids)
            for banned in _bans(canvas) or ():
                columns = [n for n, token in enumerate(ids) if token in banned.ids]
                named[: banned.positions, columns] = float("-inf")
            row = replace(row, named=named)
        rows.append(row)
    return rows


def _score_adjusted(
    head: VocabularyHead,
    canvases: Sequence[Canvas],
    hidden: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
) -> tuple[HeadStats, Tensor]:
    """Statistics whose logits are those of the rows that asked for them, one after another; and
    bool [positions], where processors ban every token."""
    banned = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    adjust = _adjust(canvases, banned)
    asking = [canvas for canvas in canvases if _cuts(canvas)]
    if asking:
        adjust = _cut(_cutoffs(head, hidden, canvases, asking), adjust)
    keep = spread(canvases, [_needs_logits(canvas) for canvas in canvases]).to(hidden.device)
    settings = _settings(canvases, hidden.device)
    stats = head(hidden, temperature, uniforms, **settings, adjust=adjust, keep_logits=keep)
    processed = spread(canvases, [bool(c.config.processors) for c in canvases])
    return stats, banned & processed.to(hidden.device)


def _settings(canvases: Sequence[Canvas], device: torch.device) -> dict[str, Any]:
    """What rows of the groups that are not plain ask of the head, whether or not they adjust."""
    counts = [canvas.soft_top_k() for canvas in canvases]
    top = [canvas.config.top_tokens or 0 for canvas in canvases]
    return {
        "soft_top_k": spread(canvases, counts).to(device) if any(counts) else None,
        "top": spread(canvases, top).to(device) if max(top) > TOP else None,
    }


# Bans.


def _bans(canvas: Canvas) -> list[Banned] | None:
    """What a row's processors ban, where they do nothing else; None where they do."""
    known = (banned_by(each, len(canvas.reply), canvas.length) for each in canvas.config.processors)
    bans = [banned for banned in known if banned is not None]
    return bans if len(bans) == len(canvas.config.processors) else None


def ban_limits(canvases: Sequence[Canvas], vocab_size: int) -> list[dict[int, int]]:
    """For each row, whose processors do nothing but ban, the number of first positions at which an
    id is banned, by id."""
    limits: list[dict[int, int]] = []
    for canvas in canvases:
        row: dict[int, int] = {}
        for banned in _bans(canvas) or []:
            for i in banned.ids:
                if 0 <= i < vocab_size:
                    row[i] = max(row.get(i, 0), banned.positions)
        limits.append(row)
    return limits


# Adjusted scores.


def _adjust(canvases: Sequence[Canvas], banned: Tensor | None = None) -> Adjust:
    """The function that applies the rows' processors to scores; banned bool [all positions], True
    at first, becomes False where they leave a token."""
    views = [canvas.before() for canvas in canvases]

    def adjust(scores: Tensor, first_id: int) -> Tensor:
        parts = []
        for canvas, view, at in zip(canvases, views, slices_of(canvases), strict=True):
            part = scores[at]
            for processor in canvas.config.processors:
                part = processor.process(part, first_id, view)
                shape = (canvas.length, scores.shape[1])
                check_returned(part, "processor", processor, "process", scores.dtype, shape)
            parts.append(part)
        adjusted = torch.cat(parts)
        if banned is not None:
            banned.logical_and_(adjusted.amax(dim=1) == float("-inf"))
        return adjusted

    return adjust


def _cut(cutoff: Tensor, adjust: Adjust) -> Adjust:
    def cut(scores: Tensor, first_id: int) -> Tensor:
        scores = adjust(scores, first_id)
        return scores.masked_fill(scores < cutoff[:, None], float("-inf"))

    return cut


def _cutoffs(
    head: VocabularyHead, hidden: Tensor, canvases: Sequence[Canvas], asking: Sequence[Canvas]
) -> Tensor:
    """The least score that top-k and top-p leave, float32 [all positions]; -inf in other rows.

    On a CPU the pass is one of the asking rows alone. Elsewhere products of fewer positions round
    otherwise than those of the step's pass, and a top-k of one token could ban that very token:
    there all rows go through it.
    """
    rows = asking if hidden.device.type == "cpu" else canvases
    chosen = [any(canvas is row for row in rows) for canvas in canvases]
    mask = spread(canvases, chosen).to(hidden.device)
    top_k = spread(rows, [c.config.top_k or 0 for c in rows]).to(hidden.device)
    top_p = spread(rows, [float(c.config.top_p or 1.0) for c in rows]).to(hidden.device)
    cutoff = torch.full((len(hidden),), float("-inf"), device=hidden.device)
    cutoff[mask] = cutoffs(head, hidden[mask], top_k, top_p, _adjust(rows))
    return cutoff


TOGETHER = 8
"""Positions of one pass: some megabytes each, with a vocabulary of 262,144 tokens."""
_BANNED = float("-inf")


@dataclass(frozen=True)
class _Masked:
    """One such position."""

    canvas: Canvas
    row: int  # in the layout's order
    place: int  # within the canvas
    at: int  # among all packed positions


def _score_masked(
    head: VocabularyHead,
    hidden: Tensor,
    positions: Sequence[_Masked],
    temperature: Tensor,
    uniforms: Tensor,
    stats: HeadStats,
    extra: Mapping[int, HeadStats],
) -> dict[int, HeadStats]:
    """Replaces the statistics of masked positions in `stats`, in place, and returns `extra` with
    those of its rows replaced; the others as in `score`. All masks go to the device in one copy."""
    changed = dict(extra)
    masks = to_device(_masks(positions, head.vocab_size), hidden.device)
    # On a CPU one by one: a product of several positions rounds otherwise than one of each.
    count = 1 if hidden.device.type == "cpu" else TOGETHER
    for start in range(0, len(positions), count):
        part = slice(start, start + count)
        members = positions[part]
        at = to_device(torch.tensor([each.at for each in members]), hidden.device)
        logits = head.logits(hidden.index_select(0, at))
        scores = _allowed(head, members, logits, masks[part])
        own = _statistics(
            head,
            scores / temperature.index_select(0, at)[:, None],
            uniforms.index_select(0, at),
            max([TOP, *(extra[e.row].top_ids.shape[1] for e in members if e.row in extra)]),
            hidden.dtype,
        )
        for name in ("argmax", "drawn", "entropy", "soft", "drawn_probs"):
            getattr(stats, name).index_copy_(0, at, getattr(own, name))
        for name in ("top_ids", "top_probs"):
            wide = getattr(own, name)
            getattr(stats, name).index_copy_(0, at, wide[:, : getattr(stats, name).shape[1]])
        for i, each in enumerate(members):
            if each.row in changed:
                changed[each.row] = _replaced(changed[each.row], each.place, own[i])
    return changed


def _positions(canvases: Sequence[Canvas], starts: Sequence[int]) -> list[_Masked]:
    positions = []
    for row, (canvas, start) in enumerate(zip(canvases, starts, strict=False)):
        guidance = canvas.guidance
        if guidance is not None and guidance.mask is not None:
            positions.append(_Masked(canvas, row, guidance.masked, start + guidance.masked))
    return positions


def _masks(positions: Sequence[_Masked], vocab_size: int) -> Tensor:
    """bool [positions, vocabulary], on the host. A model may have more tokens than its tokenizer:
    these are banned."""
    masks = torch.zeros(len(positions), vocab_size, dtype=torch.bool)
    for row, each in zip(masks, positions, strict=True):
        assert each.canvas.guidance and each.canvas.guidance.mask is not None
        mask = each.canvas.guidance.mask[:vocab_size]
        row[: len(mask)] = mask
    return masks


def _allowed(
    head: VocabularyHead, positions: Sequence[_Masked], logits: Tensor, masks: Tensor
) -> Tensor:
    """Scores float32 [positions, vocabulary] as the rows' processors change them, -inf where a mask
    bans. Processors that ban all that a mask allows count for nothing."""
    banned = logits.masked_fill(~masks, _BANNED)
    rows = []
    for each, scores in zip(positions, logits, strict=True):
        processed = _processed(head, each, scores)
        rows.append(_left(each.canvas, processed))
    changed = torch.stack(rows).masked_fill(~masks, _BANNED)
    nothing = changed.isneginf().all(dim=1, keepdim=True)
    return torch.where(nothing, banned, changed)


def _processed(head: VocabularyHead, each: _Masked, scores: Tensor) -> Tensor:
    """float32 [vocabulary] → the same. Biases and bans are applied to the one position; where there
    is any other processor, all of them see all positions of the canvas, as ever."""
    canvas, processors = each.canvas, each.canvas.config.processors
    view = canvas.before() if processors else None
    if view is None:
        return scores
    known = [(each, banned_by(each, len(view.reply), canvas.length)) for each in processors]
    if all(ban is not None or type(processor) is LogitBias for processor, ban in known):
        for processor, ban in known:
            if ban is None or each.place < ban.positions:
                only = processor if ban is None else LogitBias(dict.fromkeys(ban.ids, _BANNED))
                scores = only.process(scores[None], 0, view)[0]
        return scores
    parts = []
    for start, stop in head.chunks():
        chunk = scores[None, start:stop].expand(canvas.length, -1)
        for processor in processors:
            chunk = processor.process(chunk, start, view)
        parts.append(chunk[each.place])
    return torch.cat(parts)


def _left(canvas: Canvas, scores: Tensor) -> Tensor:
    """What top-k and top-p leave of the model's own distribution, float32 [vocabulary]."""
    top_k, top_p = canvas.config.top_k, canvas.config.top_p
    if not _cuts(canvas):
        return scores
    falling = scores.sort(descending=True)[0][: top_k or None]
    if top_p is not None:
        probs = falling.softmax(dim=0)
        falling = falling[: max(1, int((probs.cumsum(dim=0) - probs < top_p).sum()))]
    return scores.masked_fill(scores < falling[-1], _BANNED)


def _statistics(
    head: VocabularyHead, over: Tensor, uniforms: Tensor, top: int, dtype: torch.dtype
) -> HeadStats:
    """Statistics of scores over temperature, float32 [n, vocabulary], -inf where a token is
    banned."""
    logs = over.log_softmax(dim=1)
    probs = logs.exp()
    entropy = -(probs * logs.masked_fill(probs == 0, 0)).sum(dim=1)
    wide = widest_float(over.device.type)
    sums = probs.to(wide).cumsum(dim=1)
    target = uniforms.to(wide)[:, None] * sums[:, -1:]
    # The first token whose sum lies beyond the target: one without probability is none.
    drawn = (sums <= target).sum(dim=1)
    last = (sums < sums[:, -1:]).sum(dim=1)
    top_probs, top_ids = probs.topk(min(top, head.vocab_size), dim=1)
    soft, drawn = head.soft_embedding(over, dtype), torch.minimum(drawn, last)
    drawn_probs = probs.gather(1, drawn[:, None])[:, 0]
    return HeadStats(over.argmax(dim=1), drawn, entropy, top_ids, top_probs, soft, drawn_probs)


def _replaced(stats: HeadStats, place: int, own: HeadStats) -> HeadStats:
    """A row's statistics with those of one position replaced."""
    count = stats.top_ids.shape[1]
    ids, probs = stats.top_ids.clone(), stats.top_probs.clone()
    ids[place], probs[place] = own.top_ids[:count], own.top_probs[:count]
    return replace(stats, top_ids=ids, top_probs=probs)
