"""Operations with gradients that are faster on a CPU than those that torch derives: products in
bfloat16, and a norm whose gradient is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.registry import differentiable

TILE = 32
"""Only products with both sides of the weight a multiple of this are rounded to bfloat16: the
router and the vocabulary's scores are not."""


class _RMSNorm(torch.autograd.Function):
    """y = h · w with h = x · r, r = 1 / sqrt(mean(x²) + eps).

    With g = dL/dy: dL/dw = Σ g · h, and dL/dx = r · (g · w - h · mean(g · w · h)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = (length * length / x.shape[-1] + eps).rsqrt()
        unit = x * root
        ctx.save_for_backward(unit, root, weight)
        return unit if weight is None else unit * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        unit, root, weight = ctx.saved_tensors
        product, of_weight = gradients[0] * unit, None
        if weight is None:
            scaled, along = gradients[0].clone(), product.sum(-1, keepdim=True)
        else:
            of_weight = product.reshape(-1, product.shape[-1]).sum(0)
            scaled, along = gradients[0] * weight, (product @ weight).unsqueeze(-1)
        of_x = scaled.addcmul_(unit, along / unit.shape[-1], value=-1).mul_(root)
        return of_x, of_weight, None


class _Linear(torch.autograd.Function):
    """x @ w.T with all operands rounded to bfloat16, sums in float32, and the same for both
    gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rounded, narrow = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(rounded, narrow)
        return F.linear(rounded, narrow).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient, of_weight = gradients[0].bfloat16(), None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.flatten(0, -2).T @ x.flatten(0, -2)).float()
        return (gradient @ weight).float(), of_weight


def linear(x: Tensor, weight: Tensor, tile: int | None = None) -> Tensor:
    """Computes `ops.linear`: x float32 [..., in], weight float32 [out, in] → float32 [..., out]."""
    if any(size % TILE for size in weight.shape):
        return reference.linear.reference(x, weight)
    return _Linear.apply(x, weight)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Computes `ops.rms_norm` of float32 x [..., size] and weight [size] or None; the gradient is
    written by hand."""
    return _RMSNorm.apply(x, weight, eps)


@contextmanager
def fast_ops() -> Iterator[None]:
    """Operations with gradients that are faster on a CPU serve inside, wherever a gradient is asked
    for, in every thread."""
    with differentiable({"rms_norm": rms_norm, "linear": linear}):
        yield
