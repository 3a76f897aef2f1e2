"""Top-k and top-p over a vocabulary that is never held whole.

Both keep the tokens whose score reaches a position's cutoff; this module finds the cutoffs in a
pass of its own, before the head's.  Tokens that tie with the cutoff are all kept.

The least score of a nucleus of any width is found without a sort.  A float32's bits, read as a
whole number, rise with it.  So the score is determined digit by digit: each round sums, by their
next digit, the mass of the scores that begin with the digits so far.  The result is one of the
scores, exact but for the rounding of each token's mass.  Masses are summed as whole numbers, so no
order of summing and no other row changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sfumato.model.head import CHUNK, Adjust, VocabularyHead
from sfumato.model.model_config import ModelConfig
from sfumato.model.most_probable import wide
from sfumato.ops.online_softmax import BANNED
from sfumato.options.limits import MOST_TOP_K

CANDIDATES = 256  # a nucleus of up to so many tokens takes one pass
GROUP = 64  # for up to so many wider ones all scores are stored: 64 MiB at 262144 tokens
MERGED = 32  # positions whose candidates are ranked at a time, which bounds the memory


def cutoff_bytes(config: ModelConfig, positions: int) -> int:
    """The most memory that finding cutoffs takes beside a pass's buffers, with a top-k of
    MOST_TOP_K at most at each of `positions`."""
    top, size = min(MOST_TOP_K, config.vocab_size), torch.float32.itemsize
    chunk = min(CHUNK, config.vocab_size)
    merged = MERGED * (2 * chunk + top) * size
    ranked = MERGED * top * (size + torch.int64.itemsize)
    group = min(GROUP, positions)
    all_scores = group * (config.vocab_size + chunk) * size + nucleus_bytes(group, chunk)
    passes = positions * chunk * size + nucleus_bytes(positions, chunk)
    return positions * top * size + max(merged + ranked, all_scores, passes)


def cutoffs(
    head: VocabularyHead,
    hidden: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    adjust: Adjust | None = None,
) -> Tensor:
    """The least softcapped logit that survives, float32 [positions].

    hidden [positions, hidden]; top_k int64 [positions] (0: off); top_p float32 [positions] (1:
    off; the nucleus of the model's own distribution, before any temperature; the most probable
    token always survives).  With both, top-p looks at what top-k left.
    """
    counts = top_k.clamp(min=CANDIDATES).clamp(max=head.vocab_size)
    # Positions with equally many candidates form a group: the cost and the rounding of a position
    # do not depend on how many another has.
    candidates = [
        _Candidates((counts == count).nonzero()[:, 0], count) for count in counts.unique().tolist()
    ]
    total = hidden.new_full((len(hidden),), BANNED, dtype=torch.float32)  # log of the summed mass
    for start, _ in head.chunks():
        scores = _adjusted(head, hidden, start, adjust)
        total = torch.logaddexp(total, scores.logsumexp(dim=1))
        for group in candidates:
            group.offer(scores)
    cutoff = torch.empty_like(total)
    complete = torch.empty_like(top_p, dtype=torch.bool)
    for group in candidates:
        at = group.which
        cutoff[at], complete[at] = _of_candidates(group.scores, total[at], top_k[at], top_p[at])
    wide = ((top_p < 1) & ~complete & (top_k == 0)).nonzero()[:, 0]
    if len(wide):  # so flat a distribution that its nucleus holds more than the candidates
        chunks = _chunks(head, hidden, wide, adjust)
        cutoff[wide] = least_scores(chunks, total[wide], top_p[wide])
    return cutoff


class _Candidates:
    """The highest scores of some positions, gathered chunk by chunk."""

    def __init__(self, which: Tensor, count: int) -> None:
        self.which, self._count = which, count
        size = (len(which), count)
        self.scores = torch.full(size, float("-inf"), device=which.device)  # falling

    def offer(self, scores: Tensor) -> None:
        """Takes the scores [positions, n] of a chunk, all of them BANNED at least."""
        for part, which in zip(self.scores.split(MERGED), self.which.split(MERGED), strict=True):
            both = torch.cat((part, scores[which]), dim=1)
            part.copy_(both.topk(self._count, dim=1)[0])


def _of_candidates(
    best: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The cutoffs float32 [n], by the highest scores [n, m] in falling order and the log mass of
    all scores, and whether the candidates hold the whole nucleus."""
    kth = best.gather(1, (top_k.clamp(min=1, max=best.shape[1]) - 1)[:, None])[:, 0]
    limited = top_k > 0
    cutoff = torch.where(limited, kth, BANNED)
    # All that top-k leaves is among the candidates, so their sum is the whole mass for top-p.
    ranked = torch.where(limited[:, None] & (best < cutoff[:, None]), BANNED, best)
    total = torch.where(limited, ranked.logsumexp(dim=1), total)
    nucleus, complete = _nucleus(ranked, total, top_p)
    # The nucleus of what top-k left can round to more than that.
    cutoff = torch.where(top_p < 1, torch.maximum(nucleus, cutoff), cutoff)
    return cutoff, complete


def _nucleus(ranked: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in falling order [n, m], log mass [n] → the nucleus's least score, and whether it
    lies within the m."""
    probs = (ranked - total[:, None]).exp()
    before = probs.cumsum(dim=1) - probs
    inside = before < top_p[:, None]
    size = inside.sum(dim=1).clamp(min=1)
    least = ranked.gather(1, (size - 1)[:, None])[:, 0]
    return least, (before + probs)[:, -1] >= top_p


def _chunks(
    head: VocabularyHead, hidden: Tensor, which: Tensor, adjust: Adjust | None
) -> Callable[[], Iterable[Tensor]]:
    """A function that gives the scores of the positions `which`, chunk by chunk: for up to GROUP
    positions they are stored once, for more each call makes a pass."""

    def scored() -> Iterable[Tensor]:
        # Of all positions, as the head computes them: the last bits depend on the shape.
        return (_adjusted(head, hidden, start, adjust)[which] for start, _ in head.chunks())

    if len(which) > GROUP:
        return scored
    stored = hidden.new_empty(len(which), head.vocab_size, dtype=torch.float32)
    for (start, stop), scores in zip(head.chunks(), scored(), strict=True):
        stored[:, start:stop] = scores
    return lambda: (stored[:, start:stop] for start, stop in head.chunks())


def _adjusted(head: VocabularyHead, hidden: Tensor, start: int, adjust: Adjust | None) -> Tensor:
    scores = head.scores(hidden, start)
    return scores if adjust is None else adjust(scores, start).clamp(min=BANNED)


DIGITS = (11, 11, 10)  # bits of each round's digit, the highest first
BINS = 1 << max(DIGITS)
ROWS = 16  # positions at a time within a chunk, which bounds the memory
_UNIT = float(1 << 50)  # mass is counted in 1/_UNIT


def nucleus_bytes(positions: int, chunk: int) -> int:
    """The most memory that `least_scores` takes beside the scores."""
    size = torch.int64.itemsize
    return positions * BINS * size + min(ROWS, positions) * 4 * (chunk + BINS) * size


def least_scores(chunks: Callable[[], Iterable[Tensor]], total: Tensor, top_p: Tensor) -> Tensor:
    """float32 [n]: the least score over which less than top_p [n] of the mass lies.

    chunks: gives all scores, float32 [n, some] at a time, and is called once for each of DIGITS;
    total [n]: the log of their mass.
    """
    prefix = torch.zeros_like(total, dtype=torch.int32)  # the digits so far
    above = torch.zeros_like(total, dtype=torch.int64)  # mass of the scores over that prefix
    target = above
    table = above.new_empty(len(above), BINS)  # one for all rounds
    left = sum(DIGITS)
    for digit in DIGITS:
        first, left = left == sum(DIGITS), left - digit
        bins = table[:, : 1 << digit].zero_()
        for scores in chunks():
            parts = (rows.split(ROWS) for rows in (bins, scores, total, prefix))
            for into, part, log_mass, begin in zip(*parts, strict=True):
                _add_mass(into, part - log_mass[:, None], part, None if first else begin, left)
        if first:
            mass = bins.sum(dim=1)
            # In float32 the product may round up to more than all.
            target = (wide(mass) * wide(top_p)).long().minimum(mass).clamp(min=1)
        parts = (rows.split(ROWS) for rows in (bins, above, target))
        results = [_lowest_bin(*part) for part in zip(*parts, strict=True)]
        place, above = (torch.cat(column) for column in zip(*results, strict=True))
        prefix = place - BINS // 2 if first else (prefix << digit) | place
    return _swap(prefix).view(torch.float32)


def _add_mass(bins: Tensor, logs: Tensor, scores: Tensor, prefix: Tensor | None, left: int) -> None:
    """Adds the mass of scores [n, some], whose log is `logs`, to bins [n, digits] by the digit
    that has `left` bits after it; only of scores that begin with `prefix`, if given."""
    ordered = _swap((scores + 0.0).view(torch.int32))  # -0 becomes 0, which it equals
    mass = logs.exp_().mul_(_UNIT)
    places = ordered >> left
    if prefix is None:
        places += BINS // 2  # the highest digit has the sign
    else:
        digit = bins.shape[1].bit_length() - 1
        mass.masked_fill_(places >> digit != prefix[:, None], 0)
        places &= bins.shape[1] - 1
    bins.scatter_add_(1, places.long(), mass.long())


def _lowest_bin(bins: Tensor, above: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest bin over which less than `target` lies, int32 [n], and the mass over it."""
    over = bins.flip(1).cumsum(dim=1).flip(1).sub_(bins).add_(above[:, None])
    place = (over >= target[:, None]).sum(dim=1)  # it falls from bin to bin
    return place.int(), over.gather(1, place[:, None])[:, 0]


def _swap(bits: Tensor) -> Tensor:
    """The bits of float32, as int32, → whole numbers that rise with them; and back again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
