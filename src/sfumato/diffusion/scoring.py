"""The vocabulary pass of one step: every row under its own sampling settings.

Rows are scored in three groups at most.  Plain rows go through the compiled pass, and so do those
that only ban tokens; elsewhere than on a CPU nothing in their pass reads a value on the host.  Rows
that ask for fewer tokens in their soft embedding or for more named tokens are a group of their own,
and so are rows whose scores are changed otherwise, or kept: what these two groups do may depend on
data.  On a CPU `soft_skip` is a part of the plain pass, elsewhere of the second group.  A row's
statistics do not depend on which rows it is denoised with, to the last bit on a CPU, and within a
group nothing that one row asks for changes another's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.processors import Banned, banned_by
from sfumato.diffusion.soft_rows import skip_of, spans_of, spread
from sfumato.model.head import Adjust, HeadStats, VocabularyHead
from sfumato.model.head_stats import PLAIN
from sfumato.model.label_scores import named_log_probs
from sfumato.model.truncate import cutoffs
from sfumato.ops.online_softmax import TOP, Bans

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
    covered: Tensor | None  # bool [their positions]: where every token is banned


@dataclass(frozen=True)
class Scoring:
    """How rows are grouped: the same at every step of the same rows."""

    groups: tuple[ScoringGroup, ...]
    restore: Tensor | None  # int64 [positions]: from the groups' order to the rows'

    @classmethod
    def of(
        cls,
        canvases: Sequence[Canvas],
        vocab_size: int,
        device: torch.device,
        spans: Sequence[int] | None = None,
    ) -> Scoring:
        """spans: packed positions of each row, of which the first ones are its canvas's; None: no
        more than these."""
        spans = [canvas.length for canvas in canvases] if spans is None else spans
        starts = list(accumulate(spans, initial=0))
        kinds = [kind_of(canvas) for canvas in canvases]
        groups: list[ScoringGroup] = []
        order: list[Tensor] = []
        for kind in get_args(Kind):
            rows = tuple(i for i, other in enumerate(kinds) if other == kind)
            if not rows:
                continue
            members = [canvases[i] for i in rows]
            bans = None if kind == "adjusted" else _all_bans(members, vocab_size, device)
            covered = None if bans is None else bans.covers(vocab_size)
            # Statistics beyond a canvas are not read: those positions need not be left out.
            all_rows = kind == "plain" and bans is None and len(rows) == len(canvases)
            if all_rows or sum(canvas.length for canvas in members) == starts[-1]:
                return cls((ScoringGroup(kind, rows, None, bans, covered),), None)
            places = torch.cat([torch.arange(canvases[i].length) + starts[i] for i in rows])
            order.append(places)
            groups.append(ScoringGroup(kind, rows, places.to(device), bans, covered))
        restore = torch.zeros(starts[-1], dtype=torch.int64)
        together = torch.cat(order)
        restore[together] = torch.arange(len(together))
        return cls(tuple(groups), restore.to(device))


def score_rows(
    head: VocabularyHead,
    hidden: Tensor,
    canvases: Sequence[Canvas],
    temperature: Tensor,
    uniforms: Tensor,
    scoring: Scoring,
    expected: Tensor | None = None,
    embeds: bool | Tensor = True,
) -> tuple[HeadStats, dict[int, HeadStats]]:
    """The statistics of all positions, with TOP named tokens; and by row, complete, those of rows
    that asked for more tokens or for their scores. temperature float32 and uniforms float64
    [positions]; expected bool [positions]: where the step before found that the top tokens suffice
    (see `Skip`), None for nowhere; embeds: see `soft_rows.embedded`."""
    passes: list[HeadStats] = []
    extra: dict[int, HeadStats] = {}
    for group in scoring.groups:
        inputs = hidden, temperature, uniforms
        if group.positions is not None:
            inputs = (
                hidden[group.positions],
                temperature[group.positions],
                uniforms[group.positions],
            )
        members = [canvases[i] for i in group.rows]
        if group.kind == "adjusted":
            stats = _score_adjusted(head, members, *inputs)
        else:
            presumed, read = expected, embeds
            if group.positions is not None:
                presumed = None if expected is None else expected[group.positions]
                read = embeds if isinstance(embeds, bool) else embeds[group.positions]
            skip = skip_of(head, members, presumed, hidden.device)
            settings = {} if group.kind == "plain" else _settings(members, hidden.device)
            stats = head(*inputs, **settings, skip=skip, bans=group.bans, embeds=read)
            if group.covered is not None:
                entropy = stats.entropy.masked_fill(group.covered, float("inf"))
                stats = replace(stats, entropy=entropy)
        if group.kind != "plain":
            own = _with_named(head, members, _by_row(stats, members), *inputs[:2])
            rows = zip(group.rows, own, strict=True)
            extra |= {i: row for i, row in rows if _has_more(row)}
        passes.append(replace(_first_top(stats, TOP), logits=None))
    if scoring.restore is None:
        return passes[0], extra
    return _joined_stats(passes, scoring.restore), extra


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
    if config.soft_skip and canvas.device.type != "cpu":
        return "approximate"
    if config.soft_top_k is not None or (config.top_tokens or 0) > TOP:
        return "approximate"
    if config.named_tokens:
        return "approximate"
    return "plain"


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


def _by_row(stats: HeadStats, canvases: Sequence[Canvas]) -> list[HeadStats]:
    """Each row's part of a group's statistics, with as many of its most probable tokens as it asked
    for, and with its scores if it asked for them."""
    rows = []
    wanting = [canvas.length for canvas in canvases if _needs_logits(canvas)]
    logits = iter(() if stats.logits is None else stats.logits.split(wanting))
    stats = replace(stats, logits=None)
    for canvas, at in zip(canvases, spans_of(canvases), strict=True):
        row = _first_top(stats[at], max(TOP, canvas.config.top_tokens or 0))
        rows.append(replace(row, logits=next(logits)) if _needs_logits(canvas) else row)
    return rows


def _with_named(
    head: VocabularyHead,
    canvases: Sequence[Canvas],
    rows: Sequence[HeadStats],
    hidden: Tensor,
    temperature: Tensor,
) -> list[HeadStats]:
    """The rows' statistics, with the log probabilities of the tokens that a row names. What is
    banned there has none."""
    named = []
    for canvas, row, at in zip(canvases, rows, spans_of(canvases), strict=True):
        ids = canvas.config.named_tokens
        if ids:
            logs = named_log_probs(head, hidden[at], temperature[at], row, ids)
            for banned in _bans(canvas) or ():
                columns = [n for n, token in enumerate(ids) if token in banned.ids]
                logs[: banned.positions, columns] = float("-inf")
            row = replace(row, named=logs)
        named.append(row)
    return named


def _score_adjusted(
    head: VocabularyHead,
    canvases: Sequence[Canvas],
    hidden: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
) -> HeadStats:
    """Statistics whose logits are those of the rows that asked for them, one after another."""
    banned = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    adjust = _adjust(canvases, banned)
    asking = [canvas for canvas in canvases if _cuts(canvas)]
    if asking:
        adjust = _cut(_cutoffs(head, hidden, canvases, asking), adjust)
    keep = spread(canvases, [_needs_logits(canvas) for canvas in canvases]).to(hidden.device)
    settings = _settings(canvases, hidden.device)
    stats = head(hidden, temperature, uniforms, **settings, adjust=adjust, keep_logits=keep)
    processed = spread(canvases, [bool(c.config.processors) for c in canvases])
    empty = banned & processed.to(hidden.device)
    return replace(stats, entropy=stats.entropy.masked_fill(empty, float("inf")))


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
    bans = []
    for processor in canvas.config.processors:
        banned = banned_by(processor, len(canvas.reply), canvas.length)
        if banned is None:
            return None
        bans.append(banned)
    return bans


def _all_bans(canvases: Sequence[Canvas], vocab_size: int, device: torch.device) -> Bans | None:
    """Those of all rows; None where no row bans a token."""
    limits = ban_limits(canvases, vocab_size)
    lengths = [canvas.length for canvas in canvases]
    return Bans.of(limits, lengths, device) if any(limits) else None


def ban_limits(canvases: Sequence[Canvas], vocab_size: int) -> list[dict[int, int]]:
    """Of each row, whose processors do nothing but ban, the number of first positions at which an
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
        for canvas, view, at in zip(canvases, views, spans_of(canvases), strict=True):
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
    mask = torch.zeros(len(hidden), dtype=torch.bool)
    for canvas, at in zip(canvases, spans_of(canvases), strict=True):
        mask[at] = any(canvas is row for row in rows)
    mask = mask.to(hidden.device)
    top_k = spread(rows, [c.config.top_k or 0 for c in rows]).to(hidden.device)
    top_p = spread(rows, [float(c.config.top_p or 1.0) for c in rows]).to(hidden.device)
    cutoff = torch.full((len(hidden),), float("-inf"), device=hidden.device)
    cutoff[mask] = cutoffs(head, hidden[mask], top_k, top_p, _adjust(rows))
    return cutoff
