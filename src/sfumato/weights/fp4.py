"""Numbers of four bits, e2m1, with a scale of e4m3 for 16 of them: what NVFP4 stores.

Knows no files, and no scale of a whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.blocks import fp4_values

GROUP = 16
"""Columns that share a scale."""
LARGEST = 6.0 * 448.0
"""The largest code times the largest scale of a group."""


def to_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows, columns], columns a multiple of GROUP, none beyond LARGEST → codes uint8
    [rows, columns / 2], of two columns the first in the low four bits, and the groups' scales,
    float8_e4m3fn [rows, columns / GROUP].

    The largest number of a group becomes the largest code, as far as its scale, rounded to e4m3,
    allows. Codes are the nearest, ties to even ones; what is beyond the largest becomes it.
    """
    rows = len(numbers)
    parted = numbers.reshape(rows, -1, GROUP)
    groups = (parted.abs().amax(2) / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn)
    scales = groups.float()[:, :, None]
    # A group whose scale rounds to zero has no numbers: its quotients would be infinite, or NaN.
    quotients = torch.where(scales > 0, parted / scales, 0.0).view(rows, -1)
    pairs = _nearest(quotients).view(rows, -1, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4), groups


def _nearest(numbers: Tensor) -> Tensor:
    """The codes of the nearest numbers of e2m1 (0, ½, 1, 1½, 2, 3, 4, 6 and their negatives), ties
    to even codes: uint8, the sign in the fourth bit."""
    size = numbers.abs()
    code = (size > 0.25).to(torch.uint8)
    for edge, goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += size >= edge if goes_up else size > edge
    code += size > 5.0
    return code | (numbers < 0).to(torch.uint8) << 3


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [rows, columns] of codes as `to_codes` gives them; scales: of the groups, floats
    [rows, columns / GROUP]."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    numbers = fp4_values(codes.device)[pairs.int()].view(*scales.shape, GROUP)
    return (numbers * scales[:, :, None]).flatten(1)
