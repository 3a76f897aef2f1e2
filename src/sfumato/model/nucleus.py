"""The least score of a nucleus of any width, without a sort.

A float32's bits, read as a whole number, rise with it.  So the score is determined digit by digit:
each round sums, by their next digit, the mass of the scores that begin with the digits so far.
The result is one of the scores, exact but for the rounding of each token's mass.  Masses are summed
as whole numbers, so no order of summing and no other row changes it.  Knows nothing of where scores
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sfumato.model.draw import wide

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
