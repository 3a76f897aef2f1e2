"""NVFP4: codes of e2m1, a scale of e4m3 for 16 columns, and one in float32 of the matrix.

No file has blocks of it: a block here repeats the matrix's scale, so that gate and up may differ,
and then has four scales and 64 codes, the first of two columns lowest. (GGUF has other blocks by
this name.) Without a GPU's kernels matrices become Q6_K, whose scales are for 16 columns too, or
Q8_0 where rows do not divide into 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import HALF_LIMIT, of_bytes, on_device
from sfumato.weights.formats.format import OF_ROW, Format, Layout, Published
from sfumato.weights.formats.q6_k import Q6_K, with_scales
from sfumato.weights.formats.q8_0 import Q8_0

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the e2m1 codes 0..7; 8..15 are their negatives."""
_TABLE = (*FP4_VALUES, *(-value for value in FP4_VALUES))

_STEPS = tuple(range(8, 16)), (1, 2, 4, 8)
"""The largest scale of 256 columns becomes one of these products: e4m3 scales have four bits, so
that for one of them the scales within a factor of 8 to 64 are multiples of one number."""


def _numbers(codes: Tensor) -> Tensor:
    return on_device(_TABLE, codes.device)[of_bytes(codes, 4).int()]


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    codes = of_bytes(blocks[:, 8:], 4)
    return {"codes": codes, "scales": blocks[:, 4:8], OF_ROW: blocks[:, :4]}


def _unchanged(codes: Tensor, group_scales: Tensor, scale: float) -> Tensor:
    rows = len(codes)
    blocks = codes.view(rows, -1, 32)
    groups = group_scales.contiguous().view(torch.uint8).view(rows, -1, 4)
    own = torch.tensor([scale], dtype=torch.float32).view(torch.uint8).expand(groups.shape)
    return torch.cat((own, groups, blocks), dim=2).view(rows, -1)


def _q6_k(codes: Tensor, scales: Tensor) -> Tensor:
    """Doubled, FP4 values are integers up to 12. The scales of a block become integers times one
    float16, the one of 32 tries whose error in the scales is least."""
    groups = scales.reshape(-1, 16)  # [blocks, 16]
    unit, multiples = _common_unit(groups)
    step = unit.float() * multiples  # [blocks, 16]
    inverse = step.reciprocal().masked_fill_(step == 0, 0)
    ratio = (groups * inverse)[:, :, None]
    return with_scales(_numbers(codes), ratio, multiples, unit).view(len(codes), -1)


def _common_unit(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of blocks, float32 [blocks, 16], as a unit, float16 [blocks, 1], times integers
    0..127, float32 [blocks, 16], for doubled values."""
    top = groups.amax(1, keepdim=True) / 2
    if not bool(top.max() < HALF_LIMIT):
        raise ValueError("a scale is too large for a block's float16 scale")
    best_error = torch.full_like(top, torch.inf)
    best_unit, best = torch.zeros_like(top).half(), torch.zeros_like(groups)
    for odd in _STEPS[0]:
        for power in _STEPS[1]:
            unit = (top / (odd * power)).half()
            inverse = unit.float().reciprocal().masked_fill_(unit == 0, 0)
            wanted = groups / 2 * inverse
            # A scale below the unit keeps its values better with smaller codes than without any.
            multiples = wanted.round().clamp_(max=127).maximum((groups > 0).float())
            error = (multiples * unit.float() * 2 - groups).square_().sum(1, keepdim=True)
            better = (error < best_error) & (unit > 0)
            best_error = torch.where(better, error, best_error)
            best_unit = torch.where(better, unit, best_unit)
            best = torch.where(better, multiples, best)
    return best_unit, best


NVFP4 = Format(
    *("NVFP4", 64, 40, Layout(4, _parts, 0.35, (), group=16, table=_TABLE, floats=True)),
    published=Published("U8", 2, _numbers, ((Q6_K, _q6_k), (Q8_0, None)), _unchanged),
)
