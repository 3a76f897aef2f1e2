"""Products with stored weights in a training: the gradient goes to the other factor alone.

Nothing of a weight's size is kept between forward and backward.  Forward an operation is computed
as it serves, by whatever twin does; backward a weight is dequantized in parts: SLICE elements, an
expert's, or a packed matrix.  Where a product rounds its other factor, to int8 or to the
weight's codes, the gradient is that of the product without this rounding: straight-through
(Bengio et al. 2013, arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating, Weight, dense, gated
from sfumato.ops.registry import frozen
from sfumato.weights.formats import Stored


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


def stored_cross_entropies(
    hidden: Tensor, weight: Stored, wanted: Tensor, cap: float, most: int
) -> Tensor:
    """Cross-entropy in nats of each wanted token, float32 [n], from hidden [n, hidden], the output
    matrix [vocab, hidden], wanted int64 [n], and the softcap of scores (0: none). most: scores that
    exist at once."""
    out: Tensor = _CrossEntropies.apply(hidden, weight, wanted, cap, most)
    return out


class _CrossEntropies(torch.autograd.Function):
    """By ranges of the vocabulary, of all positions: so each row of the weight is dequantized once
    forward and once backward, and not for every chunk of positions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Stored, wanted: Tensor, cap: float, most: int
    ) -> Tensor:
        total = hidden.new_full((len(hidden),), float("-inf"), dtype=torch.float32)
        own = torch.zeros_like(total)
        for rows, scores, part in _ranges(hidden, weight, cap, most):
            total = torch.logaddexp(total, scores.logsumexp(-1))
            at = (wanted - rows.start).clamp(0, scores.shape[1] - 1)
            here = scores.gather(1, at[:, None])[:, 0]
            own = torch.where((wanted >= rows.start) & (wanted < rows.stop), here, own)
            del scores, part  # before the next ones are made
        ctx.save_for_backward(hidden, wanted, total)
        ctx.weight, ctx.cap, ctx.most = weight, cap, most
        return total - own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, wanted, total = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden)
        for rows, scores, part in _ranges(hidden, ctx.weight, ctx.cap, ctx.most):
            # With p the softmax: dL/dscore = p - 1 at the wanted token, p elsewhere.
            of_scores = (scores - total[:, None]).exp_()
            inside = (wanted >= rows.start) & (wanted < rows.stop)
            at = (wanted - rows.start).clamp(0, scores.shape[1] - 1)[:, None]
            of_scores.scatter_add_(1, at, -inside.to(of_scores)[:, None])
            of_scores.mul_(gradients[0][:, None])
            if ctx.cap:  # score = cap · tanh(raw / cap)
                of_scores.mul_(1 - (scores / ctx.cap).square_())
            of_hidden += of_scores.to(part.dtype) @ part
            del scores, part, of_scores
        return of_hidden, None, None, None, None


def _ranges(
    hidden: Tensor, weight: Stored, cap: float, most: int
) -> Iterator[tuple[range, Tensor, Tensor]]:
    """Ranges of the vocabulary, with the softcapped scores float32 [n, range] of hidden [n, hidden]
    and the weight's rows in its dtype."""
    step = max(1, min(most // max(1, len(hidden)), reference.SLICE // hidden.shape[-1]))
    for first in range(0, weight.shape[0], step):
        rows = range(first, min(first + step, weight.shape[0]))
        part = dense(weight[rows.start : rows.stop], hidden.dtype)
        raw = F.linear(reference.multiplied(hidden, weight), part).float()
        yield rows, (raw / cap).tanh_().mul_(cap) if cap else raw, part
        del raw, part
