"""F32, F16 and BF16: torch's own numbers, side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.format import FLOAT, Format


def _format(name: str, ggml_type: int, dtype: torch.dtype) -> Format:
    def dequantize(data: Tensor) -> Tensor:
        return data.clone().view(dtype).float()

    def encode(values: Tensor) -> Tensor:
        cast = values.to(dtype)
        if dtype == torch.float16 and not torch.equal(cast.isfinite(), values.isfinite()):
            raise ValueError("a value is too large for float16")
        return cast.contiguous().view(torch.uint8)

    size = dtype.itemsize
    return Format(name, 1, size, dequantize, ggml_type, FLOAT, dtype, encode=encode)


F32 = _format("F32", 0, torch.float32)
F16 = _format("F16", 1, torch.float16)
BF16 = _format("BF16", 30, torch.bfloat16)
