"""What a layer does between its matrix products, in plain torch: the executable specification.

Each is made of smaller operations, whose twins serve here too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from sfumato.ops.reference import Weight
from sfumato.ops.registry import ANY, call, form_of, reference


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return cast(Tensor, call("rms_norm", x.device, ANY, x, weight, eps))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return cast(Tensor, call("rotate", x.device, ANY, x, cos, sin))


@reference("prepare_heads")
def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of the projections of tokens; see `ops.prepare_heads`."""
    v = _norm(k if v is None else v, None, eps)
    k = _rotated(_norm(k, k_weight, eps), cos, sin)
    return _rotated(_norm(q, q_weight, eps), cos, sin), k, v


@reference("after_attention")
def after_attention(
    x: Tensor,
    attended: Tensor,
    weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual after attention, and two norms of it; see `ops.after_attention`."""
    x = x + _norm(attended, weight, eps)
    return x, _norm(x, dense_weight, eps), _norm(x, expert_weight, eps)


@reference("after_layer")
def after_layer(
    x: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_weight: Tensor,
    mixed_weight: Tensor,
    weight: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """The residual after a layer; see `ops.after_layer`."""
    both = _norm(dense, dense_weight, eps) + _norm(mixed, mixed_weight, eps)
    return (x + _norm(both, weight, eps)) * scalar.to(x.dtype)


@reference("route")
def route(
    x: Tensor, weight: Weight, scale: Tensor, per_expert: Tensor, active: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their shares; see `ops.route`."""
    unit = _norm(x.float(), None, eps) * scale.float() * x.shape[-1] ** -0.5
    scores: Tensor = call("linear", x.device, form_of(weight), unit, weight, None)
    shares, chosen = torch.softmax(scores, dim=-1).topk(active, dim=-1)
    shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares * per_expert.float()[chosen]
