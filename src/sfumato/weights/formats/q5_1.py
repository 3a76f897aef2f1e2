"""Q5_1: codes of five bits with a float16 scale and a float16 minimum for 32."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import (
    fifth_bits,
    five_bits,
    half_bytes,
    integers,
    inverse,
    low_nibbles,
)
from sfumato.weights.formats.format import Format, Layout


def _codes(blocks: Tensor) -> Tensor:
    return five_bits(blocks[:, 4:8], blocks[:, 8:])


def _encode(x: Tensor) -> Tensor:
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / 31
    codes = integers((x - low).mul_(inverse(scale)).add_(0.5), 31)
    halves = half_bytes(scale), half_bytes(low)
    return torch.cat((*halves, fifth_bits(codes), low_nibbles(codes)), dim=1)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": _codes(blocks), "scales": blocks[:, :2], "minima": blocks[:, 2:4]}


Q5_1 = Format("Q5_1", 32, 24, Layout(5, _parts, 0.1, (0, 2), minima=True), 7, encode=_encode)
