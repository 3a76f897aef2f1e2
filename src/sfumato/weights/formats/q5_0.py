"""Q5_0: codes of five bits from -16 with a float16 scale for 32."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import fifth_bits, five_bits, low_nibbles, signed_codes
from sfumato.weights.formats.format import Format, Layout


def _codes(blocks: Tensor) -> Tensor:
    return five_bits(blocks[:, 2:6], blocks[:, 6:])


def _encode(x: Tensor) -> Tensor:
    scale, codes = signed_codes(x, 31)
    return torch.cat((scale, fifth_bits(codes), low_nibbles(codes)), dim=1)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": _codes(blocks), "scales": blocks[:, :2]}


Q5_0 = Format("Q5_0", 32, 22, Layout(5, _parts, 0.1), 6, encode=_encode)
