"""Tensors as kernels take them: descriptors, and which tensors a kernel can read."""

from __future__ import annotations

from torch import Tensor, bfloat16, float16, float32
from triton.tools.tensor_descriptor import TensorDescriptor

from sfumato.ops.triton.kernel import interpreting
from sfumato.ops.triton.planes import ALIGNMENT
from sfumato.ops.triton.tiles import has_copy_engine

EVERYTHING = 2**30
"""A window that no two positions are apart."""

FEW = 512
"""Up to this many tokens, a matrix product has the tile for few of them."""


def use_for(tokens: int) -> str:
    """Which tile of a matrix product serves a number of tokens; see tiles.toml."""
    return "few" if tokens <= FEW else "many"


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a contiguous tensor [..., n] as rows of n, read in blocks [rows, columns]."""
    flat = matrix.reshape(-1, matrix.shape[-1])
    assert flat.data_ptr() == matrix.data_ptr()
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns])


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor | Tensor:
    """What a kernel with DESCRIPTORS takes as a matrix: a descriptor where the device has a copy
    engine, else the tensor."""
    return descriptor(x, rows, columns) if has_copy_engine(x.device) else x


def multiplied(*operands: Tensor) -> bool:
    """Whether the matrix products take these tensors: aligned bfloat16, or float32 where kernels
    are interpreted."""
    dtype = float32 if interpreting() else bfloat16
    return all(x.dtype == dtype and aligned(x) for x in operands)


def aligned(x: Tensor) -> bool:
    """Whether each row of a tensor begins at a multiple of ALIGNMENT bytes, once the tensor is
    contiguous."""
    row = x.shape[-1] * x.element_size()
    return row % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0


def elementwise(*operands: Tensor) -> bool:
    """Whether kernels that compute in float32 and store what they are given take these tensors:
    floats of the kinds that a device rounds, or float32 where kernels are interpreted."""
    kinds = (float32,) if interpreting() else (bfloat16, float16, float32)
    return all(x.dtype in kinds for x in operands)
