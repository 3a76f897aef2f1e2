"""Q3_K: codes of three bits from -4; a scale of six bits for 16, a base for 256."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import fields
from sfumato.weights.formats.format import Format, Layout


def _codes(blocks: Tensor) -> Tensor:
    top = fields(blocks[:, None, :32], 1).reshape(-1, 256)
    return fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256) | (top << 2)


def _scale_codes(blocks: Tensor) -> Tensor:
    """The scales of the 16 groups of a block, 32 too high: uint8 [n, 16].

    Of the twelve bytes, the first eight hold the low nibbles of groups 0-7 and then of 8-15; the
    last four hold the top two bits, those of groups 0-3 lowest.
    """
    low = fields(blocks[:, None, 96:104], 4).reshape(-1, 16)
    return low | (fields(blocks[:, None, 104:108], 2).reshape(-1, 16) << 4)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    scales = (_scale_codes(blocks).to(torch.int8) - 32).view(torch.uint8)
    return {"codes": _codes(blocks), "scales": scales, "bases": blocks[:, 108:]}


Q3_K = Format("Q3_K", 256, 110, Layout(3, _parts, 0.024, (108,), group=16, two_levels=True), 11)
