"""Q4_0: codes of four bits from -8 with a float16 scale for 32."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import low_nibbles, of_nibbles, scale_bytes, signed_codes
from sfumato.weights.formats.format import Format, Layout


def parts(blocks: Tensor) -> dict[str, Tensor]:
    """The planes of blocks: codes and scales."""
    return {"codes": of_nibbles(blocks[:, 2:]), "scales": blocks[:, :2]}


def encode(x: Tensor) -> Tensor:
    """float32 [n, 32] → blocks, rounded as ggml does."""
    scale, codes = signed_codes(x, 15)
    return torch.cat((scale, low_nibbles(codes)), dim=1)


def of_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Blocks of codes from -8, plus 8: uint8 [rows, columns / 2], two columns a byte, and float32
    scales [rows, groups], a group being a multiple of 32 columns; dtype: of a block's scale."""
    rows, half_columns = codes.shape
    blocks = codes.reshape(rows, half_columns // 16, 16)
    # Q4_0 has column j beside column j + 16, and not beside its neighbour.
    columns = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(rows, -1, 2, 16)
    nibbles = columns[:, :, 0] | (columns[:, :, 1] << 4)
    repeats = nibbles.shape[1] // scales.shape[1]
    each = scales.repeat_interleave(repeats, dim=1)[:, :, None]
    return torch.cat((scale_bytes(each, nibbles, dtype), nibbles), dim=2).view(rows, -1)


Q4_0 = Format("Q4_0", 32, 18, Layout(4, parts, 0.2), 2, encode=encode)
