"""INT4 as w4a16 checkpoints have it: codes from -8, and a bfloat16 scale for 32 columns or more.

No GGUF file has it. Its blocks are Q4_0's but for the scale, which is the upper half of a float32;
without a GPU's kernels, or with other scales, matrices become Q4_0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats import q4_0
from sfumato.weights.formats.bits import of_bytes
from sfumato.weights.formats.format import Format, Layout, Published


def _encode(x: Tensor) -> Tensor:
    """The codes of Q4_0, and its scale as a bfloat16."""
    blocks = q4_0.encode(x)
    scales = blocks[:, :2].contiguous().view(torch.float16).bfloat16()
    return torch.cat((scales.view(torch.uint8), blocks[:, 2:]), dim=1)


def _numbers(codes: Tensor) -> Tensor:
    return of_bytes(codes, 4).float() - 8


def _unchanged(codes: Tensor, scales: Tensor, _: float) -> Tensor:
    return q4_0.of_codes(codes, scales, torch.bfloat16)


INT4 = Format(
    *("INT4", 32, 18, Layout(4, q4_0.parts, 0.2, wide=True)),
    encode=_encode,
    published=Published("I32", 2, _numbers, ((q4_0.Q4_0, q4_0.of_codes),), _unchanged),
)
