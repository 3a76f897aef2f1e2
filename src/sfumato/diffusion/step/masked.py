"""The positions of a step at which a grammar leaves only some tokens: one of a row at most.

They are scored again, after the pass over the vocabulary and by themselves, so that a row's other
positions have the numbers that they would have without the mask, and no other row is slower by more
than one position.  All masks go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.processors import LogitBias, banned_by
from sfumato.model.head import HeadStats, VocabularyHead
from sfumato.model.to_device import to_device
from sfumato.ops.online_softmax import TOP

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


def score_masked(
    head: VocabularyHead,
    hidden: Tensor,
    canvases: Sequence[Canvas],
    spans: Sequence[int],
    temperature: Tensor,
    uniforms: Tensor,
    stats: HeadStats,
    extra: Mapping[int, HeadStats],
) -> dict[int, HeadStats]:
    """Replaces the statistics of masked positions in `stats`, in place, and returns `extra` with
    those of its rows replaced; spans: packed positions of each row; the others as in
    `scoring.score_rows`."""
    changed = dict(extra)
    positions = _positions(canvases, spans)
    if not positions:
        return changed
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
        for name in ("argmax", "drawn", "entropy", "soft"):
            getattr(stats, name).index_copy_(0, at, getattr(own, name))
        for name in ("top_ids", "top_probs"):
            wide = getattr(own, name)
            getattr(stats, name).index_copy_(0, at, wide[:, : getattr(stats, name).shape[1]])
        for i, each in enumerate(members):
            if each.row in changed:
                changed[each.row] = _replaced(changed[each.row], each.place, own[i])
    return changed


def _positions(canvases: Sequence[Canvas], spans: Sequence[int]) -> list[_Masked]:
    starts = accumulate(spans, initial=0)
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
        rows.append(_cut(each.canvas, processed))
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
    bans = [banned_by(processor, len(view.reply), canvas.length) for processor in processors]
    known = zip(processors, bans, strict=True)
    if all(ban is not None or type(processor) is LogitBias for processor, ban in known):
        for processor, ban in zip(processors, bans, strict=True):
            if ban is None or each.place < ban.positions:
                only = processor if ban is None else LogitBias(dict.fromkeys(ban.ids, _BANNED))
                scores = only.process(scores[None], 0, view)[0]
        return scores
    parts = []
    for start, stop in head.spans():
        chunk = scores[None, start:stop].expand(canvas.length, -1)
        for processor in processors:
            chunk = processor.process(chunk, start, view)
        parts.append(chunk[each.place])
    return torch.cat(parts)


def _cut(canvas: Canvas, scores: Tensor) -> Tensor:
    """What top-k and top-p leave of the model's own distribution, float32 [vocabulary]."""
    top_k, top_p = canvas.config.top_k, canvas.config.top_p
    if not top_k and (top_p is None or top_p >= 1):
        return scores
    falling = scores.sort(descending=True)[0][: top_k or None]
    if top_p is not None:
        probs = falling.softmax(dim=0)
        falling = falling[: max(1, int((probs.cumsum(dim=0) - probs < top_p).sum()))]
    return scores.masked_fill(scores < falling[-1], _BANNED)


def _statistics(
    head: VocabularyHead, over: Tensor, uniforms: Tensor, top: int, dtype: torch.dtype
) -> HeadStats:
    """Of scores over temperature, float32 [n, vocabulary], -inf where a token is banned."""
    logs = over.log_softmax(dim=1)
    probs = logs.exp()
    entropy = -(probs * logs.masked_fill(probs == 0, 0)).sum(dim=1)
    wide = torch.float32 if over.device.type == "mps" else torch.float64
    sums = probs.to(wide).cumsum(dim=1)
    target = uniforms.to(wide)[:, None] * sums[:, -1:]
    # The first token whose sum lies beyond the target: one without probability is none.
    drawn = (sums <= target).sum(dim=1)
    last = (sums < sums[:, -1:]).sum(dim=1)
    top_probs, top_ids = probs.topk(min(top, head.vocab_size), dim=1)
    soft = head.soft_embedding(over, dtype)
    return HeadStats(
        over.argmax(dim=1), torch.minimum(drawn, last), entropy, top_ids, top_probs, soft
    )


def _replaced(stats: HeadStats, place: int, own: HeadStats) -> HeadStats:
    """A row's statistics with those of one position replaced."""
    count = stats.top_ids.shape[1]
    ids, probs = stats.top_ids.clone(), stats.top_probs.clone()
    ids[place], probs[place] = own.top_ids[:count], own.top_probs[:count]
    return replace(stats, top_ids=ids, top_probs=probs)
