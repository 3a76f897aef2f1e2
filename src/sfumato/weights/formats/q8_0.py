"""Q8_0: int8 codes with a float16 scale for 32."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import half_bytes, inverse, scale_bytes
from sfumato.weights.formats.format import Format, Layout


def _encode(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * inverse(scale)
    # Halves round away from zero; adding 0.5 would also lift the float just below a half.
    codes = scaled.to(torch.int8)
    codes += scaled.sub_(codes).mul_(2).to(torch.int8)
    return torch.cat((half_bytes(scale), codes.view(torch.uint8)), dim=1)


def of_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks of int8 codes [rows, columns] and float32 scales [1 or rows, 1]."""
    rows, columns = codes.shape
    blocks = codes.view(torch.uint8).view(rows, columns // 32, 32)
    each = scales.expand(rows, -1)[:, :, None]
    return torch.cat((scale_bytes(each, blocks), blocks), dim=2).view(rows, -1)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": blocks[:, 2:], "scales": blocks[:, :2]}


Q8_0 = Format("Q8_0", 32, 34, Layout(8, _parts, 0.013), 8, encode=_encode)
