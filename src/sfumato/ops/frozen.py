"""Products with stored weights in a training: the gradient goes to the other factor alone.

Nothing of a weight's size is kept between forward and backward.  Forward an operation is computed
as it serves, by whatever twin does; backward a weight is dequantized in parts: SLICE elements, an
expert's, or a packed matrix.  Where a product rounds its other factor, to int8 or to the
weight's codes, the gradient is that of the product without this rounding: straight-through
(Bengio et al. 2013, arXiv:1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating, Weight, dense, gated
from sfumato.ops.registry import frozen


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, tile: int | None) -> Tensor:
        ctx.weight = weight
        return reference.linear(x, weight, tile)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start, of_x = 0, gradients[0].new_zeros(*gradients[0].shape[:-1], ctx.weight.shape[1])
        for part in reference.parts(ctx.weight):
            end = start + part.shape[0]
            of_x += gradients[0][..., start:end] @ dense(part, of_x.dtype)
            start = end
        return of_x, None, None


class _ExpertProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(offsets)
        return reference.expert_products(x, offsets, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        of_x = gradients[0].new_zeros(len(gradients[0]), ctx.weight.shape[2])
        (offsets,), start = ctx.saved_tensors, 0
        for expert, end in enumerate(offsets.tolist()):
            if end > start:
                of_x[start:end] = gradients[0][start:end] @ dense(ctx.weight[expert], of_x.dtype)
            start = end
        return of_x, None, None


class _Experts(torch.autograd.Function):
    """Keeps its arguments alone; what lies between the products is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, shares: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(x, chosen, shares)
        ctx.others = others
        return reference.experts(x, chosen, shares, *others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, chosen, shares = (each.detach() for each in ctx.saved_tensors)
        gate_up, down, gating = ctx.others

        def parts(rows: Tensor, offsets: Tensor) -> Tensor:
            gate, up = reference.expert_products(rows, offsets, gate_up).chunk(2, dim=-1)
            return reference.expert_products(gated(gate, up, gating), offsets, down)

        with torch.enable_grad():
            given = x.requires_grad_(), shares.requires_grad_()
            out = reference.mixture(x, chosen, shares, gate_up.shape[0], parts)
        of_x, of_shares = torch.autograd.grad(out, given, gradients[0])
        return of_x, None, of_shares, None, None, None


@frozen("linear")
def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """See `ops.linear`."""
    out: Tensor = _Linear.apply(x, weight, tile)
    return out


@frozen("expert_products")
def expert_products(x: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    """See `ops.expert_products`."""
    out: Tensor = _ExpertProducts.apply(x, offsets, weight)
    return out


@frozen("experts")
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    gating: Gating = "gelu",
) -> Tensor:
    """See `ops.experts`. Neither weight has a gradient, stored or not."""
    out: Tensor = _Experts.apply(x, chosen, shares, gate_up, down, gating)
    return out
