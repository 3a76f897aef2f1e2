"""The vocabulary pass of one step: every row under its own sampling settings.

Rows are scored in two groups at most.  Plain rows go through the compiled pass, and so do those
that only ban tokens; rows whose scores are changed otherwise, or kept whole, go through another
arithmetic.  So what a row finds does not depend on which rows it is denoised with, to the last bit
on a CPU, and within a group nothing that one row asks for changes another's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.processors import Banned, banned_by
from sfumato.model.approximate import Skip
from sfumato.model.head import Adjust, HeadStats, VocabularyHead
from sfumato.model.truncate import cutoffs
from sfumato.ops.online_softmax import TOP, Bans


def score(head: VocabularyHead, hidden: Tensor, canvases: Sequence[Canvas]) -> list[HeadStats]:
    """What each canvas's own hidden states, in hidden [all positions, hidden], come to.

    The entropy is infinite where processors ban every token.
    """
    parts = hidden.split([canvas.length for canvas in canvases])
    found: dict[int, HeadStats] = {}
    for changed in (False, True):
        group = [i for i, canvas in enumerate(canvases) if _changes_scores(canvas) == changed]
        if not group:
            continue
        whole = len(group) == len(canvases)
        own = hidden if whole else torch.cat([parts[i] for i in group])
        score_group = _score_changed if changed else _score_plain
        found.update(zip(group, score_group(head, own, [canvases[i] for i in group]), strict=True))
    return [found[i] for i in range(len(canvases))]


def _changes_scores(canvas: Canvas) -> bool:
    """Whether a row asks for more of its scores than bans of tokens."""
    return _cuts(canvas) or _needs_logits(canvas) or _bans(canvas) is None


def _cuts(canvas: Canvas) -> bool:
    """Whether a row asks for top-k or top-p; a top-p of 1 leaves all."""
    top_p = canvas.config.top_p
    return bool(canvas.config.top_k) or (top_p is not None and top_p < 1)


def _needs_logits(canvas: Canvas) -> bool:
    rules = (canvas.config.sampler, canvas.config.stopping)
    return any(getattr(rule, "needs_logits", False) for rule in rules)


def _score_plain(
    head: VocabularyHead, hidden: Tensor, canvases: Sequence[Canvas]
) -> list[HeadStats]:
    bans = _all_bans(canvases, head.vocab_size, hidden.device)
    stats = head(hidden, **_settings(canvases, hidden.device), bans=bans)
    if bans is not None:
        covered = bans.covers(head.vocab_size)
        stats = replace(stats, entropy=stats.entropy.masked_fill(covered, float("inf")))
    return _by_row(stats, canvases)


def _score_changed(
    head: VocabularyHead, hidden: Tensor, canvases: Sequence[Canvas]
) -> list[HeadStats]:
    banned = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    adjust = _adjust(canvases, banned)
    asking = [canvas for canvas in canvases if _cuts(canvas)]
    if asking:
        adjust = _cut(_cutoffs(head, hidden, canvases, asking), adjust)
    keep = _spread(canvases, [_needs_logits(canvas) for canvas in canvases]).to(hidden.device)
    settings = _settings(canvases, hidden.device)
    stats = head(hidden, **settings, adjust=adjust, keep_logits=keep)
    logits = stats.logits
    processed = _spread(canvases, [bool(c.config.processors) for c in canvases])
    empty = banned & processed.to(hidden.device)
    stats = replace(stats, entropy=stats.entropy.masked_fill(empty, float("inf")), logits=None)
    rows = _by_row(stats, canvases)
    if logits is not None:
        wanting = [i for i, canvas in enumerate(canvases) if _needs_logits(canvas)]
        kept = logits.split([canvases[i].length for i in wanting])
        for i, own in zip(wanting, kept, strict=True):
            rows[i] = replace(rows[i], logits=own)
    return rows


def _by_row(stats: HeadStats, canvases: Sequence[Canvas]) -> list[HeadStats]:
    """Each row's own part, with as many of its most probable tokens as it asked for."""
    rows = []
    for canvas, at in zip(canvases, _spans(canvases), strict=True):
        own, few = stats[at], max(TOP, canvas.config.top_tokens or 0)
        if own.top_ids.shape[1] > few:
            own = replace(own, top_ids=own.top_ids[:, :few], top_probs=own.top_probs[:, :few])
        rows.append(own)
    return rows


def _settings(canvases: Sequence[Canvas], device: torch.device) -> dict[str, Any]:
    """What both groups give the head alike."""
    few = [canvas.soft_top_k() for canvas in canvases]
    shares = [canvas.config.soft_skip or 0.0 for canvas in canvases]
    top = [canvas.config.top_tokens or 0 for canvas in canvases]
    guess = torch.cat([canvas.argmax for canvas in canvases])
    return {
        "temperature": _spread(canvases, [c.temperature() for c in canvases]).to(device),
        "uniform": torch.cat([c.uniforms() for c in canvases]),
        "skip": Skip(_spread(canvases, shares).to(device), guess) if any(shares) else None,
        "soft_top_k": _spread(canvases, few).to(device) if any(few) else None,
        "top": _spread(canvases, top).to(device) if max(top) > TOP else None,
    }


def _spans(canvases: Sequence[Canvas]) -> list[slice]:
    ends = torch.tensor([canvas.length for canvas in canvases]).cumsum(0).tolist()
    return [slice(end - c.length, end) for end, c in zip(ends, canvases, strict=True)]


def _spread(canvases: Sequence[Canvas], values: Sequence[float]) -> Tensor:
    """One value a row → one a position."""
    return torch.cat([torch.full((c.length,), v) for c, v in zip(canvases, values, strict=True)])


# Bans.


def _bans(canvas: Canvas) -> list[Banned] | None:
    """What a row's processors ban, where they do nothing else; None where they do."""
    found = []
    for processor in canvas.config.processors:
        banned = banned_by(processor, len(canvas.reply), canvas.length)
        if banned is None:
            return None
        found.append(banned)
    return found


def _all_bans(canvases: Sequence[Canvas], vocab_size: int, device: torch.device) -> Bans | None:
    """Those of all rows; None where no row bans a token."""
    limits: list[dict[int, int]] = []
    for canvas in canvases:
        row: dict[int, int] = {}
        for banned in _bans(canvas) or []:
            for i in banned.ids:
                if 0 <= i < vocab_size:
                    row[i] = max(row.get(i, 0), banned.positions)
        limits.append(row)
    lengths = [canvas.length for canvas in canvases]
    return Bans.of(limits, lengths, device) if any(limits) else None


# Changed scores.


def _adjust(canvases: Sequence[Canvas], banned: Tensor | None = None) -> Adjust:
    """What the rows' processors make of scores; banned bool [all positions], True at first,
    becomes False where they leave a token."""
    views = [canvas.before() for canvas in canvases]

    def adjust(scores: Tensor, first_id: int) -> Tensor:
        parts = []
        for canvas, view, at in zip(canvases, views, _spans(canvases), strict=True):
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
    own = torch.zeros(len(hidden), dtype=torch.bool)
    for canvas, at in zip(canvases, _spans(canvases), strict=True):
        own[at] = any(canvas is row for row in rows)
    own = own.to(hidden.device)
    top_k = _spread(rows, [c.config.top_k or 0 for c in rows]).to(hidden.device)
    top_p = _spread(rows, [float(c.config.top_p or 1.0) for c in rows]).to(hidden.device)
    cutoff = torch.full((len(hidden),), float("-inf"), device=hidden.device)
    cutoff[own] = cutoffs(head, hidden[own], top_k, top_p, _adjust(rows))
    return cutoff
