"""Every operation of the network in plain torch: the executable specification.

Weights come either as float tensors or as `Stored`, which is dequantized one tensor (or one expert)
at a time.  Every function is differentiable in its float arguments, works on any torch
device, and treats rows independently.  On a CPU, and where no gradient is asked for, that holds to
the last bit: torch rounds by shape and place, so products, attention and GELU are computed here in
shapes that do not depend on how many other rows there are.  Other devices round as they do.
"""

from __future__ import annotations

import math
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

ROWS, MANY, FEW = 64, 256, 16
"""Rows of every product on a CPU with a small weight, a large one, and a large one of an expert.

Torch's libraries choose kernels, and how a sum is cut, by the number of rows: in bfloat16, and in
float32 with large weights, two numbers of rows seldom round alike, multiples of 16 or not. With
one fixed number they always do, wherever a row stands (measured with MKL and oneDNN, AVX2 to AMX).
The fewer rows, the less is padding; the more, the less often a weight is read. Experts have few."""

LARGE = 1 << 20
"""Elements from which a weight is large: time goes into reading it, rather than into calls."""

QUERIES, KEYS = 64, 512
"""Of one call of torch's causal attention: how many queries, and how many keys or a multiple."""


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype.

    tile: rows of each product on a CPU; None: by the weight's size (see `ROWS`).
    """
    factor = dense(weight, x.dtype)
    if not _steady(x, factor):
        return F.linear(x, factor)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    size = tile or (MANY if factor.numel() >= LARGE else ROWS)
    out = rows.new_empty(len(rows), len(factor))
    whole = len(rows) // size * size
    for at in range(0, whole, size):
        torch.mm(rows[at : at + size], factor.T, out=out[at : at + size])
    if rest := len(rows) - whole:
        padded = F.pad(rows[whole:], (0, 0, 0, size - rest))
        out[whole:] = torch.mm(padded, factor.T)[:rest]
    return out.view(*x.shape[:-1], len(factor))


def gelu(x: Tensor) -> Tensor:
    """`x · Φ(x)`, by the tanh approximation, in float32; x's dtype again.

    Torch's own takes another tanh for the last few elements of a call or a thread's share.
    """
    if not _steady(x):
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    bent = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2 / math.pi)).tanh_()
    return bent.add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def _steady(*inputs: Tensor) -> bool:
    """Whether shapes are to be such that rows round alike: not where a gradient is asked for,
    since training has no companions."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return not grad and all(x.device.type == "cpu" for x in inputs)


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
    dtypes may differ; causal None: every token sees every key → like q.  On a CPU a token's result
    does not depend on which others come in a call: see `_in_tiles`.
    """
    k, v = (torch.cat([part.to(q.dtype) for part in parts], dim=1) for parts in (keys, values))
    q = q.transpose(0, 1)
    if causal is None:
        return attention(q, k, v).transpose(0, 1)
    seen = causal.keys <= causal.queries[:, None]
    if causal.window is not None:
        seen &= causal.keys > causal.queries[:, None] - causal.window
    attended = _in_tiles if _steady(q, k, v) and k.shape[1] >= q.shape[1] else attention
    return attended(q, k, v, seen).transpose(0, 1)


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention whose result for a token does not depend on which others come with it.

    As `attention` without a batch; the queries' own keys are the last ones.  Torch rounds by the
    number of queries, by a query's place among them, and by where its blocks of 512 keys begin and
    end.  So tokens go in aligned tiles: a token is always the same one of QUERIES, which see the
    same blocks of KEYS, if the first key's position is a multiple of KEYS.
    """
    n, m = seen.shape
    front = (m - n) % QUERIES
    rows, short = (front, -(front + n) % QUERIES), -m % KEYS
    q, seen = F.pad(q, (0, 0, *rows)), F.pad(seen, (0, short, *rows))
    k, v = F.pad(k, (0, 0, 0, short)), F.pad(v, (0, 0, 0, short))
    parts = []
    for queries, sees in zip(q.split(QUERIES, 1), seen.split(QUERIES), strict=True):
        blocks = sees.any(dim=0).view(-1, KEYS).any(dim=1).nonzero()[:, 0].tolist() or [0]
        at = slice(blocks[0] * KEYS, (blocks[-1] + 1) * KEYS)
        hidden = q.new_zeros(QUERIES, at.stop - at.start)
        hidden.masked_fill_(~sees[:, at], float("-inf"))
        parts.append(attention(queries.contiguous(), k[:, at], v[:, at], hidden))
    return torch.cat(parts, dim=1)[:, front : front + n]


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

    def products(groups: Sequence[Tensor], weight: Weight) -> Tensor:
        tile = FEW if math.prod(weight.shape[1:]) >= LARGE else ROWS
        pairs = [(group, expert) for expert, group in enumerate(groups) if len(group)]
        return torch.cat([linear(group, weight[expert], tile) for group, expert in pairs])

    gate, up = products(x.index_select(0, order // k).split(counts), gate_up).chunk(2, dim=-1)
    parts = products((gelu(gate) * up).split(counts), down)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    weighted = parts.index_select(0, back).view(*chosen.shape, -1)
    return (weighted * shares.unsqueeze(-1).to(x.dtype)).sum(1)
