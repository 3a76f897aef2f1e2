"""Top-k and top-p over a vocabulary that is never held whole.

Both keep the tokens whose score reaches a position's cutoff; this module finds the cutoffs in a
pass of its own, before the head's.  Tokens that tie with the cutoff are all kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.model.head import BANNED, Adjust, VocabularyHead

CANDIDATES = 256  # a nucleus within so many tokens is found in one pass
GROUP = 64  # positions whose scores are held whole, where it is not: 64 MiB at 262144 tokens


def cutoffs(
    head: VocabularyHead,
    hidden: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    adjust: Adjust | None = None,
) -> Tensor:
    """The least softcapped logit that survives, float32 [positions].

    hidden [positions, hidden]; top_k int64 [positions] (0: off); top_p float32 [positions] (1:
    off; the nucleus of the model's own law, before any temperature; the likeliest token always
    survives).  With both, top-p looks at what top-k left.
    """
    few = min(head.vocab_size, max(CANDIDATES, int(top_k.max())))
    best = hidden.new_empty((len(hidden), 0), dtype=torch.float32)
    total = hidden.new_full((len(hidden),), BANNED, dtype=torch.float32)  # log of the summed mass
    for start, _ in head.spans():
        scores = _adjusted(head, hidden, start, adjust)
        total = torch.logaddexp(total, scores.logsumexp(dim=1))
        best = torch.cat((best, scores), dim=1).topk(min(few, best.shape[1] + scores.shape[1]))[0]
    kth = best.gather(1, (top_k.clamp(min=1, max=best.shape[1]) - 1)[:, None])[:, 0]
    limited = top_k > 0
    cutoff = torch.where(limited, kth, BANNED)
    # What top-k leaves is known whole, so top-p needs no other sum over it.
    ranked = torch.where(limited[:, None] & (best < cutoff[:, None]), BANNED, best)
    total = torch.where(limited, ranked.logsumexp(dim=1), total)
    nucleus, found = _nucleus(ranked, total, top_p)
    # The nucleus of what top-k left can round to more than that.
    cutoff = torch.where(top_p < 1, torch.maximum(nucleus, cutoff), cutoff)
    wide = ((top_p < 1) & ~found & ~limited).nonzero()[:, 0]
    if len(wide):  # so flat a law that its nucleus holds more than the candidates
        cutoff[wide] = _by_sorting(head, hidden, wide, top_p, adjust)
    return cutoff


def _nucleus(ranked: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in falling order [n, m], log mass [n] → the nucleus's least score, and whether it
    lies within the m."""
    probs = (ranked - total[:, None]).exp()
    before = probs.cumsum(dim=1) - probs
    inside = before < top_p[:, None]
    size = inside.sum(dim=1).clamp(min=1)
    least = ranked.gather(1, (size - 1)[:, None])[:, 0]
    return least, (before + probs)[:, -1] >= top_p


def _by_sorting(
    head: VocabularyHead, hidden: Tensor, which: Tensor, top_p: Tensor, adjust: Adjust | None
) -> Tensor:
    parts = []
    for group in which.split(GROUP):
        whole = torch.cat(
            [_adjusted(head, hidden, a, adjust)[group] for a, _ in head.spans()], dim=1
        )
        for row, limit in zip(whole.split(1), top_p[group].split(1), strict=True):
            ranked = row.sort(dim=1, descending=True)[0]
            parts.append(_nucleus(ranked, ranked.logsumexp(dim=1), limit)[0])
    return torch.cat(parts)


def _adjusted(head: VocabularyHead, hidden: Tensor, start: int, adjust: Adjust | None) -> Tensor:
    scores = head.scores(hidden, start)
    return scores if adjust is None else adjust(scores, start).clamp(min=BANNED)
