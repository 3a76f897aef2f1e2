"""One denoising step of any number of rows: a forward, a pass over the vocabulary, a settlement.

Rows share the two passes and nothing else; each has its own step, temperature, noise, sampler and
stopping rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.checks import check_returned
from sfumato.model.approximate import Skip
from sfumato.model.cache import Slot
from sfumato.model.head import Adjust, HeadStats
from sfumato.model.network import Network
from sfumato.model.truncate import cutoffs


@torch.no_grad()
def denoise_step(
    network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]
) -> list[Draft]:
    """Moves each canvas one step on; canvases[i] follows the prefix that slots[i] holds."""
    found = look(network, canvases, slots)
    return [canvas.settle(stats) for canvas, stats in zip(canvases, found, strict=True)]


@torch.no_grad()
def look(network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[HeadStats]:
    """What one forward finds on each canvas; changes none of them, so it may be repeated."""
    hidden = network.denoise(
        [canvas.tokens for canvas in canvases], slots, [canvas.soft for canvas in canvases]
    )
    stats = score(network, hidden, canvases)
    return [stats[at] for at in _spans(canvases)]


def score(network: Network, hidden: Tensor, canvases: Sequence[Canvas]) -> HeadStats:
    """The head's pass over hidden [all positions, hidden] under each row's own law.

    The entropy is infinite where processors ban every token.
    """
    processed = any(canvas.config.processors for canvas in canvases)
    banned = torch.full((len(hidden),), processed, device=hidden.device)
    adjust = _adjust(canvases, banned) if processed else None
    if any(canvas.config.top_k or canvas.config.top_p for canvas in canvases):
        top_k = _spread(canvases, [c.config.top_k or 0 for c in canvases]).to(hidden.device)
        top_p = _spread(canvases, [c.config.top_p or 1.0 for c in canvases]).to(hidden.device)
        adjust = _cut(cutoffs(network.head, hidden, top_k, top_p, adjust), adjust)
    stats = network.head(
        hidden,
        temperature=_spread(canvases, [c.temperature() for c in canvases]).to(hidden.device),
        uniform=torch.cat([c.uniforms() for c in canvases]),
        adjust=adjust,
        keep_logits=any(_needs_logits(canvas) for canvas in canvases),
        skip=_skip(canvases, hidden.device),
        soft_top_k=_soft_top_k(canvases, hidden.device),
    )
    return replace(stats, entropy=stats.entropy.masked_fill(banned, float("inf")))


def _skip(canvases: Sequence[Canvas], device: torch.device) -> Skip | None:
    """None, which is exact, unless a row asks for less; the others skip nothing that counts."""
    shares = [canvas.config.soft_skip or 0.0 for canvas in canvases]
    if not any(shares):
        return None
    guess = torch.cat([canvas.argmax for canvas in canvases])
    return Skip(_spread(canvases, shares).to(device), guess)


def _soft_top_k(canvases: Sequence[Canvas], device: torch.device) -> Tensor | None:
    """None, which is exact, unless a row asks for a few; the others have 0, which is all."""
    counts = [canvas.soft_top_k() for canvas in canvases]
    return _spread(canvases, counts).to(device) if any(counts) else None


def _needs_logits(canvas: Canvas) -> bool:
    rules = (canvas.config.sampler, canvas.config.stopping)
    return any(getattr(rule, "needs_logits", False) for rule in rules)


def _spans(canvases: Sequence[Canvas]) -> list[slice]:
    ends = torch.tensor([canvas.length for canvas in canvases]).cumsum(0).tolist()
    return [slice(end - c.length, end) for end, c in zip(ends, canvases, strict=True)]


def _spread(canvases: Sequence[Canvas], values: Sequence[float]) -> Tensor:
    """One value a row → one a position."""
    return torch.cat([torch.full((c.length,), v) for c, v in zip(canvases, values, strict=True)])


def _adjust(canvases: Sequence[Canvas], banned: Tensor) -> Adjust:
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
        banned.logical_and_(adjusted.amax(dim=1) == float("-inf"))
        return adjusted

    return adjust


def _cut(cutoff: Tensor, adjust: Adjust | None) -> Adjust:
    def cut(scores: Tensor, first_id: int) -> Tensor:
        if adjust is not None:
            scores = adjust(scores, first_id)
        return scores.masked_fill(scores < cutoff[:, None], float("-inf"))

    return cut
