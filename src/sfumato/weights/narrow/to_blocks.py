"""Narrow codes in blocks without a search for scales: codes stay, and scales become the blocks'.

A block's scale is float16. A scale that float16 holds stays as it is, and with it every value;
another is off by 2⁻¹² of itself at most, where it is no smaller than 2⁻¹⁴. Knows no files.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_LIMIT = 65520.0  # from here on a float rounds to an infinite float16
_STEPS = tuple(range(8, 16)), (1, 2, 4, 8)
"""The largest scale of 256 columns becomes one of these products: e4m3 scales have four bits, so
that for one of them the scales within a factor of 8 to 64 are multiples of one number."""


def q8_0_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 codes [rows, columns] and float32 scales [rows, 1] → uint8 [rows, bytes of Q8_0]."""
    rows, columns = codes.shape
    blocks = codes.view(torch.uint8).view(rows, columns // 32, 32)
    return torch.cat((_half_bytes(scales[:, :, None], blocks), blocks), dim=2).view(rows, -1)


def q4_0_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes from -8, plus 8: uint8 [rows, columns / 2], two columns a byte, and float32 scales
    [rows, groups], a group being a multiple of 32 columns → uint8 [rows, bytes of Q4_0]."""
    return _nibble_blocks(codes, scales, torch.float16)


def int4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """As `q4_0_blocks`, of scales that bfloat16 holds, which stay exact: INT4 blocks."""
    return _nibble_blocks(codes, scales, torch.bfloat16)


def _nibble_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """dtype: of a block's scale, float16 or bfloat16."""
    rows, half = codes.shape
    blocks = codes.reshape(rows, half // 16, 16)
    # Q4_0 has column j beside column j + 16, and not beside its neighbour.
    columns = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(rows, -1, 2, 16)
    nibbles = columns[:, :, 0] | (columns[:, :, 1] << 4)
    repeats = nibbles.shape[1] // scales.shape[1]
    each = scales.repeat_interleave(repeats, dim=1)[:, :, None]
    return torch.cat((_half_bytes(each, nibbles, dtype), nibbles), dim=2).view(rows, -1)


def nvfp4_blocks(codes: Tensor, group_scales: Tensor, scale: float) -> Tensor:
    """e2m1 codes uint8 [rows, columns / 2], e4m3 scales [rows, columns / 16] and the matrix's own →
    uint8 [rows, bytes of NVFP4], columns a multiple of 64."""
    rows = len(codes)
    blocks = codes.view(rows, -1, 32)
    groups = group_scales.contiguous().view(torch.uint8).view(rows, -1, 4)
    own = torch.tensor([scale], dtype=torch.float32).view(torch.uint8).expand(groups.shape)
    return torch.cat((own, groups, blocks), dim=2).view(rows, -1)


def q6_k_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """FP4 values [rows, columns], float32, and scales of 16 columns each, float32
    [rows, columns / 16], columns a multiple of 256 → uint8 [rows, bytes of Q6_K].

    Doubled, FP4 values are integers up to 12. The scales of a block become integers times one
    float16, the one of 32 tries whose error in the scales is least.
    """
    rows = len(codes)
    groups = scales.reshape(-1, 16)  # [blocks, 16]
    unit, multiples = _common_unit(groups)
    step = unit.float() * multiples  # [blocks, 16]
    inverse = step.reciprocal().masked_fill_(step == 0, 0)
    ratio = (groups * inverse)[:, :, None]
    codes = (codes.view(-1, 16, 16) * ratio).round_().clamp_(-32, 31).add_(32).to(torch.uint8)
    low, high = (codes & 15).view(-1, 2, 2, 64), (codes >> 4).view(-1, 2, 4, 32)
    low_bytes = (low[:, :, 0] | (low[:, :, 1] << 4)).view(-1, 128)
    high_bytes = high[:, :, 0].clone()
    for index in range(1, 4):
        high_bytes |= high[:, :, index] << (2 * index)
    scale_bytes = multiples.to(torch.int8).view(torch.uint8)
    parts = (low_bytes, high_bytes.view(-1, 64), scale_bytes, unit.view(torch.uint8))
    return torch.cat(parts, dim=1).view(rows, -1)


def _common_unit(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of blocks, float32 [blocks, 16], as a unit, float16 [blocks, 1], times integers
    0..127, float32 [blocks, 16], for doubled values."""
    top = groups.amax(1, keepdim=True) / 2
    if not bool(top.max() < _HALF_LIMIT):
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


def _half_bytes(scales: Tensor, blocks: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """float32 [rows, 1 or blocks, 1] → the float16 or bfloat16 of each block, uint8
    [rows, blocks, 2]."""
    if dtype == torch.float16 and not bool(scales.max() < _HALF_LIMIT):
        raise ValueError("a scale is too large for a block's float16 scale")
    halves = scales.to(dtype).contiguous().view(torch.uint8)
    return halves.expand(*blocks.shape[:2], 2)
