"""Gated GELU, RMS norm and rotary embedding by the compiled library: one pass, rounded once.

A row's result depends neither on the other rows of a call nor on the number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.kernels import DTYPES
from sfumato.ops.registry import twin


def _known(x: Tensor, other: Tensor | None, *_: object) -> bool:
    """Whether the library knows the dtypes."""
    known = x.dtype in DTYPES and (other is None or other.dtype in DTYPES)
    return known and library.kernels is not None


def _same_dtype(x: Tensor, *others: Tensor) -> bool:
    same = x.dtype in DTYPES and all(other.dtype == x.dtype for other in others)
    return same and library.kernels is not None


@twin("geglu", "cpu", serves=_same_dtype, refusal=library.refusal)
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `ops.geglu`. Both may be parts of the columns of a wider tensor."""
    assert gate.shape == up.shape, f"{gate.shape} and {up.shape}"
    columns = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype)
    if out.numel() == 0:
        return out
    gate, up = _rows(gate), _rows(up)
    kernels = library.loaded()
    kernels.run(
        *("sf_geglu", kernels.level, gate.data_ptr(), gate.stride(0)),
        *(up.data_ptr(), up.stride(0), DTYPES[gate.dtype], len(gate), columns, out.data_ptr()),
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., columns] → [rows, columns], whose rows may lie apart."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) >= 0 else rows.contiguous()


@twin("rms_norm", "cpu", serves=_known, refusal=library.refusal)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    columns = x.shape[-1]
    assert weight is None or weight.shape == (columns,), f"{x.shape} by {weight.shape}"
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    weight = weight if weight is None else weight.contiguous()
    scale = (None, 0) if weight is None else (weight.data_ptr(), DTYPES[weight.dtype])
    kernels = library.loaded()
    kernels.run(
        *("sf_rms_norm", kernels.level, x.data_ptr(), DTYPES[x.dtype], x.numel() // columns),
        *(columns, *scale, eps, out.data_ptr()),
    )
    return out


@twin("rotate", "cpu", serves=_same_dtype, refusal=library.refusal)
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ops.rotate`."""
    *tokens, heads, size = x.shape
    half = size // 2
    assert cos.shape == sin.shape == (*tokens, half), f"{x.shape} by {cos.shape}"
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    kernels = library.loaded()
    kernels.run(
        *("sf_rotate", kernels.level, x.data_ptr(), DTYPES[x.dtype], math.prod(tokens), heads),
        *(half, cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
    )
    return out
