"""Attention: the projections of one layer, and which keys a token sees in each phase.

The phases share the projections.  They differ in where keys and values come from and go to, and
that is an `Attend`: the kinds here use the cache and serve inference, on packed tokens of several
rows; training has its own, on padded batches with gradients.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from sfumato import ops
from sfumato.model.layers import Linear, RMSNorm
from sfumato.model.model_config import LayerConfig, ModelConfig


class Attend(Protocol):
    """Attention of one layer over the keys and values that each query sees."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., tokens, heads, d]; k, v [..., tokens, kv_heads, d] → like q."""
        ...


class PlacedAttend(Attend, Protocol):
    """Attention of packed tokens whose positions it knows."""

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        ...

    @property
    def encodes(self) -> Tensor | None:
        """bool [tokens, 1]: which tokens are in the encode phase; None: none."""
        ...


class KeepingAttend(Attend, Protocol):
    """Attention that keeps keys and values, for later tokens."""

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keeps those of a layer, [tokens, kv_heads, d], whose attention is not wanted."""
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
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        layer: int,
        only: Tensor | None = None,
    ) -> Tensor:
        """x [..., tokens, hidden] → [..., tokens, hidden]; only int64 [n]: of which tokens, packed,
        results are wanted (None: of all)."""
        if only is None:
            heads = (*x.shape[:-1], -1, self.head_dim)
            q, k = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
            v = None if self.v_proj is None else self.v_proj(x).view(heads)
            weights = self.q_norm.weight, self.k_norm.weight
            q, k, v = ops.prepare_heads(q, k, v, *weights, *rotary, self.eps)
        else:
            k, v = self.keys_values(x, rotary)
            x = x.index_select(0, only)
            rotary = rotary[0].index_select(0, only), rotary[1].index_select(0, only)
            q = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim)
            q = ops.rotate(self.q_norm(q), *rotary)
        return self.o_proj(attend(layer, q, k, v).reshape(*x.shape[:-1], -1))

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., tokens, hidden] → keys and values [..., tokens, kv_heads, d]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        k = self.k_proj(x).view(heads)
        v = self.v_proj(x).view(heads) if self.v_proj is not None else k
        return ops.rotate(self.k_norm(k), *rotary), ops.rms_norm(v, None, self.eps)
