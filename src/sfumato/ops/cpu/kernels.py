"""Products with packed weights and dequantization by the compiled library.

A row's result depends neither on the other rows of a call nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.ops.registry import BLOCKS, PANELS, twin
from sfumato.weights.blocks import BLOCK_FORMATS, QuantizedTensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What activations may be, by their number in the library."""


_PACKED = "weights that are packed for it"


def contiguous(x: Tensor) -> Tensor:
    """Activations as the library takes them: contiguous, and of a dtype that it knows."""
    return (x if x.dtype in DTYPES else x.float()).contiguous()


@twin("linear", "cpu", PANELS, refusal=library.refusal, note=_PACKED)
def linear(x: Tensor, weight: PackedTensor, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype."""
    rows, columns = weight.shape
    assert x.shape[-1] == columns, f"{x.shape} by {weight.shape}"
    kernels, given = library.loaded(), contiguous(x)
    out = given.new_empty(*x.shape[:-1], rows)
    if x.numel() == 0:
        return out.to(x.dtype)
    kernels.run(
        *("sf_linear", kernels.level, weight.mode, weight.kind, weight.data.data_ptr()),
        *(rows, columns, given.data_ptr(), DTYPES[given.dtype], given.numel() // columns),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin("experts", "cpu", PANELS, refusal=library.refusal, note=_PACKED)
def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: PackedTensor, down: PackedTensor
) -> Tensor:
    """A gated-GELU mixture of experts; see the reference.

    Raises ValueError for the number of an expert that does not exist.
    """
    count, hidden, inner = down.shape
    assert gate_up.shape == (count, 2 * inner, hidden) and x.shape[-1] == hidden
    assert chosen.shape == shares.shape == (len(x), chosen.shape[-1])
    assert chosen.dtype == torch.int64, f"choices are int64, not {chosen.dtype}"
    kernels, given = library.loaded(), contiguous(x)
    chosen, shares = chosen.contiguous(), shares.float().contiguous()
    out = torch.zeros_like(given)
    if chosen.numel() == 0:
        return out.to(x.dtype)
    # Where the two differ, as with one of them in bfloat16, the more exact serves both.
    mode = max(gate_up.mode, down.mode)
    kernels.run(
        *("sf_experts", kernels.level, mode, gate_up.kind, gate_up.data.data_ptr()),
        *(down.kind, down.data.data_ptr(), count, hidden, inner),
        *(given.data_ptr(), DTYPES[given.dtype], len(given)),
        *(chosen.data_ptr(), shares.data_ptr(), chosen.shape[-1]),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin(
    *("dense", "cpu", BLOCKS),
    serves=lambda weight, *_: library.kernels is not None and weight.format.name in BLOCK_FORMATS,
    refusal=library.refusal,
    note="quantized weights",
)
def dequantize(weight: QuantizedTensor, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """All elements, bit for bit those of `weight.dequantize`: a new tensor, or `spare` where that
    is given, contiguous and `dtype` is one of DTYPES."""
    out = spare if dtype in DTYPES else None
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype if dtype in DTYPES else torch.float32)
    if out.numel() == 0:
        return out.to(dtype)
    kernels = library.loaded()
    kernels.run(
        *("sf_dequantize", kernels.level, weight.format.ggml_type, weight.data.data_ptr()),
        *(out.numel(), out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(dtype)
