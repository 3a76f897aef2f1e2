"""Q4_K: codes of four bits; a scale and a minimum of six bits for 32, bases of both for 256."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import (
    columns,
    fields,
    finite_half,
    fit_affine,
    integers,
    inverse,
    join,
)
from sfumato.weights.formats.format import Format, Layout


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [n, 8, 32] below 16 → uint8 [n, 128]."""
    return join(codes.view(-1, 4, 2, 32), 4).view(-1, 128)


def of_nibbles(low: Tensor) -> Tensor:
    """uint8 [n, 128] → uint8 [n, 256]."""
    return fields(low.reshape(-1, 4, 32), 4).reshape(-1, 256)


def _scale_codes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the 8 groups of a Q4_K or Q5_K block as codes, each uint8 [n, 8].

    Twelve bytes hold eight 6-bit scales and eight 6-bit offsets: the low six bits of bytes 0-3 and
    4-7 are groups 0-3; bytes 8-11 carry the low nibbles of groups 4-7, whose top two bits are the
    top two bits of bytes 0-3 and 4-7.
    """
    first, second, nibbles = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, (nibbles & 15) | ((first >> 2) & 48)), dim=1)
    offset = torch.cat((second & 63, (nibbles >> 4) | ((second >> 2) & 48)), dim=1)
    return scale, offset


def planes(blocks: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """The parts of Q4_K or Q5_K blocks with these codes."""
    scales, minima = _scale_codes(blocks)
    halves = {"bases": blocks[:, :2], "minimum_bases": blocks[:, 2:4]}
    return {"codes": codes, "scales": scales, "minima": minima, **halves}


def _super_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Group scales ≥ 0, float32 [n, 8], in six bits: their float16 scale [n, 1], and the codes."""
    scale = values.amax(1, keepdim=True) / 63
    return finite_half(scale), (values * inverse(scale)).round_().clamp_(0, 63)


def head_and_codes(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of a Q4_K or Q5_K block, and its codes, uint8 [n, 8, 32]."""
    scales, offsets = fit_affine(columns(x, 32), levels)
    scale, scale_codes = _super_scale(scales.view(-1, 8))
    offset, offset_codes = _super_scale(offsets.view(-1, 8))
    step = (scale.float() * scale_codes)[:, :, None]
    codes = x.view(-1, 8, 32) + (offset.float() * offset_codes)[:, :, None]
    codes = integers(codes.mul_(inverse(step)).round_().clamp_(0, levels), levels)
    s, o = integers(scale_codes, 63), integers(offset_codes, 63)
    packed = (
        s[:, :4] | (s[:, 4:] >> 4 << 6),
        o[:, :4] | (o[:, 4:] >> 4 << 6),
        (s[:, 4:] & 15) | ((o[:, 4:] & 15) << 4),
    )
    return torch.cat((scale.view(torch.uint8), offset.view(torch.uint8), *packed), dim=1), codes


def _encode(x: Tensor) -> Tensor:
    head, codes = head_and_codes(x, 15)
    return torch.cat((head, nibbles(codes)), dim=1)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return planes(blocks, of_nibbles(blocks[:, 16:]))


Q4_K = Format(
    *("Q4_K", 256, 144, Layout(4, _parts, 0.004, (0, 2), two_levels=True, minima=True), 12),
    encode=_encode,
)
