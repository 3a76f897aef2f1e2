"""Matrices in panels by their columns, for sums of their rows, such as the head's soft embeddings.

Such a panel holds int8 with a float16 scale for each column of 32 rows, and is multiplied by int8
that is never below zero: masses, in blocks of 32 with a float32 scale each.  So a processor without
products of bfloat16 needs no float32 of the whole vocabulary.  Both are rounded by 1/254 of the
largest of their 32 at most; the relative L2 error of a sum of many rows is about 7e-3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.weights.formats import QuantizedTensor, Weight

KIND = 8  # SF_SIGNED_BYTES of csrc/sfumato.h


def packs_columns(weight: Tensor | QuantizedTensor, beside: Weight | None) -> bool:
    """Whether `pack_columns` packs a matrix that is also multiplied in the form `beside`: blocks on
    a CPU whose products are of int8, where the processor multiplies no bfloat16."""
    kernels = library.kernels
    if kernels is None or kernels.bf16 or not isinstance(weight, QuantizedTensor):
        return False
    return isinstance(beside, PackedTensor) and beside.activations == "int8"


def column_bytes(shape: tuple[int, int]) -> int:
    """Bytes of the panels of a matrix [rows, columns]."""
    rows, columns = shape
    size: int = library.loaded().code.sf_panel_bytes(KIND, columns, rows)
    assert size >= 0, f"{shape}: cannot be packed by columns"
    return size


def pack_columns(weight: QuantizedTensor, spare: Tensor | None = None) -> PackedTensor:
    """The transposed matrix [columns, rows] in panels, for activations that are never below zero;
    spare: uint8, memory of `column_bytes` at least, that may be taken for it."""
    rows, columns = weight.shape
    size = column_bytes((rows, columns))
    out = torch.empty(size, dtype=torch.uint8) if spare is None else spare[:size]
    assert out.dtype == torch.uint8 and out.numel() == size and out.is_contiguous()
    data, kernels = weight.data.contiguous(), library.loaded()
    kernels.run(
        *("sf_pack_columns", kernels.level, weight.format.ggml_type, data.data_ptr()),
        *(rows, columns, out.data_ptr()),
    )
    return PackedTensor(out, KIND, weight.format, (columns, rows), "int8")
