"""The small parts of the network: linear maps, norms, the gated MLP, rotary tables.

Modules hold weights and nothing else; a weight is a parameter, or a `QuantizedTensor` that
`model/loading.py` puts in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.model_config import LayerConfig


class Linear(nn.Module):
    """`x @ weight.T` without bias: [..., inputs] → [..., outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


class RMSNorm(nn.Module):
    """RMS norm over the last axis with a learned scale (`x · w`, not `1 + w`)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """`down(gelu_tanh(gate(x)) · up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x)))


class SelfConditioning(GatedMLP):
    """Adds the previous step's soft embedding to the canvas embeddings, then normalises the sum."""

    def __init__(self, hidden: int, inner: int, eps: float) -> None:
        super().__init__(hidden, inner)
        self.pre_norm = RMSNorm(hidden, eps)

    def forward(self, embedded: Tensor, soft: Tensor | None = None) -> Tensor:
        """embedded [..., hidden] and soft [..., hidden] (None: zeros) → [..., hidden]."""
        if soft is not None:  # the MLP has no bias: zeros in, zeros out
            embedded = embedded + super().forward(self.pre_norm(soft))
        return ops.rms_norm(embedded, None, self.pre_norm.eps)


RotaryKey = tuple[float, int, int]
"""What the rotary tables of a layer depend on: theta, turning pairs, head_dim."""


def rotary_key(layer: LayerConfig) -> RotaryKey:
    return layer.rope_theta, layer.rope_pairs, layer.head_dim


class Rotary:
    """Rotary tables for any positions; the frequencies are computed once for each device."""

    def __init__(self, layers: Sequence[LayerConfig]) -> None:
        self._keys = tuple(dict.fromkeys(rotary_key(layer) for layer in layers))
        self._frequencies: dict[tuple[RotaryKey, torch.device], Tensor] = {}

    def tables(
        self, positions: Tensor, dtype: torch.dtype
    ) -> dict[RotaryKey, tuple[Tensor, Tensor]]:
        """cos and sin [..., head_dim / 2] for int positions [...], one pair per kind of layer.

        Angles are float32; the tables are rounded to `dtype`, as the reference does.
        """
        tables, wide = {}, positions.unsqueeze(-1).float()
        for key in self._keys:
            angles = wide * self._frequencies_of(key, positions.device)
            tables[key] = angles.cos().to(dtype), angles.sin().to(dtype)
        return tables

    def _frequencies_of(self, key: RotaryKey, device: torch.device) -> Tensor:
        """float32 [head_dim / 2]: pair i turns by position · theta^(-2i / head_dim); pairs from
        `rope_pairs` on stay still ("proportional" RoPE)."""
        if (key, device) not in self._frequencies:
            theta, pairs, head_dim = key
            steps = torch.arange(0, 2 * pairs, 2, device=device).float()
            frequencies = torch.zeros(head_dim // 2, device=device)
            frequencies[:pairs] = 1.0 / theta ** (steps / head_dim)
            self._frequencies[key, device] = frequencies
        return self._frequencies[key, device]


def rounded(value: float, dtype: torch.dtype) -> float:
    """The value as a tensor of that dtype would hold it, rounded to nearest even.  No tensor is
    made: making one on an accelerator would be a copy to it."""
    fraction, exponent = math.frexp(value)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)
