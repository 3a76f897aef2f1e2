"""The least score of a nucleus of any width, found without a sort.

A float32's bits, read as a whole number, rise with it.  So the score is found digit by digit: each
round sums, by their next digit, the mass of the scores that begin with the digits found so far.
The result is one of the scores, exact but for the rounding of each token's mass.  Masses are summed
as whole numbers, so no order of summing and no other row changes it.  Knows nothing of where scores
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sfumato.model.draw import wide

DIGITS = (11, 11, 10)  # bits that each round finds, the highest first
BINS = 1 << max(DIGITS)
ROWS = 16  # positions looked at together within a chunk: bounds what that takes
_UNIT = float(1 << 50)  # mass is counted in 1/_UNIT


def nucleus_bytes(positions: int, chunk: int) -> int:
    """The most that `least_scores` holds, but for the scores that it is given."""
    size = torch.int64.itemsize
    return positions * BINS * size + min(ROWS, positions) * 4 * (chunk + BINS) * size


def least_scores(chunks: Callable[[], Iterable[Tensor]], total: Tensor, top_p: Tensor) -> Tensor:
    """float32 [n]: the least score over which less than top_p [n] of the mass lies.

    chunks: gives all scores, float32 [n, some] at a time, and is called once for each of DIGITS;
    total [n]: the log of their mass.
    """
    known = torch.zeros_like(total, dtype=torch.int32)  # the digits found so far
    above = torch.zeros_like(total, dtype=torch.int64)  # mass over all that begin with them
    wanted = above
    table = above.new_empty(len(above), BINS)  # one for all rounds
    left = sum(DIGITS)
    for digit in DIGITS:
        first, left = left == sum(DIGITS), left - digit
        bins = table[:, : 1 << digit].zero_()
        for scores in chunks():
            parts = (rows.split(ROWS) for rows in (bins, scores, total, known))
            for into, part, log_mass, prefix in zip(*parts, strict=True):
                _count(into, part - log_mass[:, None], part, None if first else prefix, left)
        if first:
            mass = bins.sum(dim=1)
            # In float32 the product may round up to more than all.
            wanted = (wide(mass) * wide(top_p)).long().minimum(mass).clamp(min=1)
        parts = (rows.split(ROWS) for rows in (bins, above, wanted))
        found = [_find(*part) for part in zip(*parts, strict=True)]
        place, above = (torch.cat(one) for one in zip(*found, strict=True))
        known = place - BINS // 2 if first else (known << digit) | place
    return _swap(known).view(torch.float32)


def _count(bins: Tensor, logs: Tensor, scores: Tensor, known: Tensor | None, left: int) -> None:
    """Adds the mass of scores [n, some], whose log is `logs`, to bins [n, digits] by the digit
    that has `left` bits after it; of those alone that begin with `known`, if given."""
    ordered = _swap((scores + 0.0).view(torch.int32))  # -0 becomes 0, which it equals
    mass = logs.exp_().mul_(_UNIT)
    places = ordered >> left
    if known is None:
        places += BINS // 2  # the highest digit has the sign
    else:
        digit = bins.shape[1].bit_length() - 1
        mass.masked_fill_(places >> digit != known[:, None], 0)
        places &= bins.shape[1] - 1
    bins.scatter_add_(1, places.long(), mass.long())


def _find(bins: Tensor, above: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest bin over which less than `wanted` lies, int32 [n], and what lies over it."""
    over = bins.flip(1).cumsum(dim=1).flip(1).sub_(bins).add_(above[:, None])
    place = (over >= wanted[:, None]).sum(dim=1)  # it falls from bin to bin
    return place.int(), over.gather(1, place[:, None])[:, 0]


def _swap(bits: Tensor) -> Tensor:
    """The bits of float32, as int32, → whole numbers that rise with them; and back again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
