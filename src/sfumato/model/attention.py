"""Attention: the projections of one layer, and who may look at what in each phase.

The projections are shared by the phases.  What differs is where keys and values come from and go
to, and that is an `Attend`: the cached kinds here serve inference, on packed tokens of several
rows; training brings its own, on padded batches with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.cache import Slot
from sfumato.model.config import LayerConfig, ModelConfig
from sfumato.model.layers import Linear, RMSNorm


class Attend(Protocol):
    """Lets the queries of one layer look at the keys and values that they may see."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., tokens, heads, d]; k, v [..., tokens, kv_heads, d] → like q."""
        ...


class Attention(nn.Module):
    """Projections, per-head norms and rotary embedding of one layer."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.head_dim, self.eps = layer.head_dim, eps
        self.q_proj = Linear(hidden, config.num_heads * layer.head_dim)
        self.k_proj = Linear(hidden, layer.kv_heads * layer.head_dim)
        self.v_proj = Linear(hidden, layer.kv_heads * layer.head_dim) if layer.sliding else None
        self.o_proj = Linear(config.num_heads * layer.head_dim, hidden)
        self.q_norm = RMSNorm(layer.head_dim, eps)
        self.k_norm = RMSNorm(layer.head_dim, eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        """x [..., tokens, hidden] → [..., tokens, hidden]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_proj(x).view(heads)
        k = self.k_proj(x).view(heads)
        v = self.v_proj(x).view(heads) if self.v_proj is not None else k
        q = ops.rotate(self.q_norm(q), *rotary)
        k = ops.rotate(self.k_norm(k), *rotary)
        v = ops.rms_norm(v, None, self.eps)
        return self.o_proj(attend(layer, q, k, v).reshape(*x.shape[:-1], -1))


@dataclass(frozen=True)
class Rows:
    """Packed tokens of several rows: `counts[i]` new tokens that follow the prefix of `slots[i]`.

    One row after another keeps attention free of padding and masks between rows, and makes a
    row's result independent of its neighbours.
    """

    slots: Sequence[Slot]
    counts: Sequence[int]

    def positions(self, device: torch.device) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        return torch.cat(
            [
                torch.arange(slot.length, slot.length + count, device=device)
                for slot, count in zip(self.slots, self.counts, strict=True)
            ]
        )

    def _split(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """[tokens, heads, d] each → per row, [count, heads, d] each."""
        pieces = [t.split(list(self.counts)) for t in tensors]
        return list(zip(*pieces, strict=True))


class EncodeRows(Rows):
    """Causal attention that writes: each token sees its prefix and itself."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for slot, (rq, rk, rv) in zip(self.slots, self._split(q, k, v), strict=True):
            rk, rv = rk.transpose(0, 1), rv.transpose(0, 1)
            old_k, old_v, old_positions = slot.history(layer)
            new = torch.arange(slot.length, slot.length + len(rq), device=q.device)
            causal = ops.Causal(new, torch.cat((old_positions, new)), slot.window(layer))
            outs.append(ops.attend(rq, (*old_k, rk), (*old_v, rv), causal))
            slot.write(layer, rk, rv)
        return torch.cat(outs)


class DenoiseRows(Rows):
    """Attention of canvases, which reads only: each position sees the prefix and all its canvas.

    On sliding layers every position sees the same last `window - 1` prefix positions, which is
    exactly what a slot keeps of them, so no mask is needed.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for slot, (rq, rk, rv) in zip(self.slots, self._split(q, k, v), strict=True):
            old_k, old_v, _ = slot.read(layer)
            keys, values = (old_k, rk.transpose(0, 1)), (old_v, rv.transpose(0, 1))
            outs.append(ops.attend(rq, keys, values))
        return torch.cat(outs)
