"""Tensors as kernels take them: descriptors, and which tensors a kernel can read."""

from __future__ import annotations

from torch import Tensor, bfloat16, float16, float32
from triton.tools.tensor_descriptor import TensorDescriptor

from sfumato.ops.triton.kernel import interpreting
from sfumato.ops.triton.planes import ALIGNMENT, PlaneTensor, takes
from sfumato.ops.triton.tiles import has_copy_engine
from sfumato.weights.formats import ScaledTensor

EVERYTHING = 2**30
"""A window that no two positions are apart."""


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor | Tensor:
    """What a kernel with DESCRIPTORS takes as a matrix: where the device has a copy engine, a
    descriptor of a contiguous tensor [..., n] as rows of n, read in blocks [rows, columns]; else
    the tensor."""
    if not has_copy_engine(x.device):
        return x
    flat = x.reshape(-1, x.shape[-1])
    assert flat.data_ptr() == x.data_ptr()
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns])


def multiplied(*operands: Tensor) -> bool:
    """Whether the matrix products take these tensors: bfloat16, or float32 where kernels are
    interpreted, of which each row begins at a multiple of ALIGNMENT bytes, once the tensor is
    contiguous."""
    dtype = float32 if interpreting() else bfloat16
    return all(
        x.dtype == dtype
        and x.shape[-1] * x.element_size() % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
        for x in operands
    )


def multiplies(x: Tensor, *weights: Tensor | PlaneTensor | ScaledTensor) -> bool:
    """Whether the matrix products take x and these weights."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    return all(map(takes, weights)) and multiplied(x, *floats)


def elementwise(*operands: Tensor) -> bool:
    """Whether kernels that compute in float32 and store what they are given take these tensors:
    floats of the kinds that a device rounds, or float32 where kernels are interpreted."""
    kinds = (float32,) if interpreting() else (bfloat16, float16, float32)
    return all(x.dtype in kinds for x in operands)
