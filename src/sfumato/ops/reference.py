"""Every operation of the network in plain torch: the executable specification.

Weights come either as float tensors or as `Stored`, which is dequantized one tensor (or one expert)
at a time.  Every function is differentiable in its float arguments, works on any torch
device, and treats rows independently: what one row gets does not depend on its neighbours, but for
the rounding of torch's own matrix products (on a CPU `linear` sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.weights.blocks import QuantizedTensor


class Stored(Protocol):
    """A weight in another form than floats: blocks, or what a faster twin made of them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice, /) -> Stored: ...

    def dequantize(self, dtype: torch.dtype, /) -> Tensor: ...


Weight = Tensor | Stored

ROWS = 16
"""Rows of a product on a CPU, or a multiple of them. Torch rounds few rows, and those left over
when threads have shared the rest, otherwise than many; what a request is told would then depend
on who else is served."""


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype."""
    factor = dense(weight, x.dtype)
    grad = torch.is_grad_enabled() and (x.requires_grad or factor.requires_grad)
    rows = x.reshape(-1, x.shape[-1])
    short = -len(rows) % ROWS
    if x.device.type != "cpu" or grad or not short:
        return F.linear(x, factor)
    padded = F.pad(rows, (0, 0, 0, short))
    return F.linear(padded, factor)[: len(rows)].view(*x.shape[:-1], -1)


def embed(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding: ids int64 [...], weight [vocab, hidden] → [..., hidden]."""
    if isinstance(weight, QuantizedTensor):
        rows = weight.index_select(ids.reshape(-1)).dequantize(dtype)
        return rows.view(*ids.shape, weight.shape[-1])
    return F.embedding(ids, weight).to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis, in float32; x's dtype again."""
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2): x [..., heads, d]; cos and sin [..., d/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention with scale 1 and grouped heads.

    q [..., heads, n, d]; k and v [..., kv_heads, m, d]; mask [..., n, m], bool with True where a
    query may look, or what to add to the scores (None: everywhere) → [..., heads, n, d].
    """
    *batch, heads, n, d = q.shape
    kv_heads, m = k.shape[-3:-1]
    group = heads // kv_heads
    # Torch's fused kernels want exactly four axes; with others it takes a slower path.
    if mask is None:
        # The heads that share a key head become more queries of that head.
        folded = q.reshape(-1, kv_heads, group * n, d)
        k, v = k.reshape(-1, kv_heads, m, d), v.reshape(-1, kv_heads, m, d)
        return F.scaled_dot_product_attention(folded, k, v, scale=1.0).view(q.shape)
    # A batch entry for each key head: its group sees views of one key, one value and one mask.
    grouped = q.reshape(-1, group, n, d)
    k, v = (x.reshape(-1, 1, m, d).expand(-1, group, -1, -1) for x in (k, v))
    mask = mask.unsqueeze(-3).expand(*batch, kv_heads, n, m).reshape(-1, 1, n, m)
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=1.0).view(q.shape)


@dataclass(frozen=True)
class Causal:
    """Who sees whom: a token the keys at its own position and before, at most `window` of them."""

    queries: Tensor  # int64 [tokens]: their positions
    keys: Tensor  # int64 [m]
    window: int | None = None


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """Softmax attention of one row's tokens, scale 1, grouped heads.

    q [tokens, heads, d]; keys and values in parts, one after another, each [kv_heads, n, d], whose
    dtypes may differ; causal None: every token sees every key → like q.
    """
    k, v = (torch.cat([part.to(q.dtype) for part in parts], dim=1) for parts in (keys, values))
    mask = None
    if causal is not None:
        mask = causal.keys <= causal.queries[:, None]
        if causal.window is not None:
            mask &= causal.keys > causal.queries[:, None] - causal.window
    return attention(q.transpose(0, 1), k, v, mask).transpose(0, 1)


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """A gated-GELU mixture of experts.

    x [tokens, hidden]; chosen int64 and shares float [tokens, k]; gate_up [experts, 2·m, hidden]
    with the gate first; down [experts, hidden, m] → [tokens, hidden].  Tokens are grouped by
    expert, so each expert's weights are read once; a token's k parts are summed in the order of
    `chosen`, whatever else is in the batch.
    """
    k = chosen.shape[-1]
    order = chosen.reshape(-1).argsort(stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=gate_up.shape[0]).tolist()
    groups = x.index_select(0, order // k).split(counts)
    parts = []
    for expert, group in enumerate(groups):
        if len(group):
            gate, up = linear(group, gate_up[expert]).chunk(2, dim=-1)
            parts.append(linear(F.gelu(gate, approximate="tanh") * up, down[expert]))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (
        torch.cat(parts).index_select(0, back).view(*chosen.shape, -1)
        * shares.unsqueeze(-1).to(x.dtype)
    ).sum(1)
