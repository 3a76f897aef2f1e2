"""The vision tower and its projector: patches of one picture → soft tokens of the text network.

Plain torch over the project's operations, for one picture at a time and without padding; weights
are floats or stay quantized, as in `model/transformer.py`.  An `Encoding` goes through the layers
in slices, so that other work has a turn in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.adapters import Adapted
from sfumato.model.transformer import GatedMLP, Linear, RMSNorm
from sfumato.model.vision.config import VisionConfig
from sfumato.weights.checkpoint import Checkpoint

HEADS = 32
"""A head is filled up with zeros, which change no product, to a multiple of this: a CPU's compiled
attention takes no others."""


class ClampedLinear(Linear):
    """A linear map whose inputs and outputs are clamped, by bounds that its checkpoint holds."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.input_min, self.input_max = _number(), _number()
        self.output_min, self.output_max = _number(), _number()

    def forward(self, x: Tensor, adapted: Sequence[Adapted] = ()) -> Tensor:
        x = super().forward(torch.clamp(x, self.input_min, self.input_max), adapted)
        return torch.clamp(x, self.output_min, self.output_max)


class ClampedMLP(GatedMLP):
    """A gated MLP whose products are clamped one by one."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(hidden, inner)
        self.gate_proj, self.up_proj = ClampedLinear(hidden, inner), ClampedLinear(hidden, inner)
        self.down_proj = ClampedLinear(inner, hidden)

    def _gated(self, x: Tensor, adapted: Sequence[Adapted]) -> Tensor:
        return ops.gated(self.gate_proj(x, adapted), self.up_proj(x, adapted), self.gating)


class Attention(nn.Module):
    """Attention of all patches of a picture to one another, scale 1."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        linear = ClampedLinear if config.clamps else Linear
        hidden, size, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.head_dim = size
        self.q_proj = linear(hidden, config.num_heads * size)
        self.k_proj = linear(hidden, config.kv_heads * size)
        self.v_proj = linear(hidden, config.kv_heads * size)
        self.o_proj = linear(config.num_heads * size, hidden)
        self.q_norm, self.k_norm = RMSNorm(size, self.eps), RMSNorm(size, self.eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., patches, hidden] → like x; rotary: cos and sin, see `rotary_of`."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = _turned(self.q_norm(self.q_proj(x).view(heads)), rotary)
        k = _turned(self.k_norm(self.k_proj(x).view(heads)), rotary)
        v = ops.rms_norm(self.v_proj(x).view(heads), None, self.eps)
        if x.ndim == 2:
            q, k, v = (F.pad(each, (0, -self.head_dim % HEADS)) for each in (q, k, v))
            out = ops.attend(q, [k.transpose(0, 1)], [v.transpose(0, 1)])[..., : self.head_dim]
        else:  # pictures of one size, in training
            out = ops.attention(*(each.transpose(-2, -3) for each in (q, k, v))).transpose(-2, -3)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = (ClampedMLP if config.clamps else GatedMLP)(hidden, config.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., patches, hidden] → like x."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class VisionTower(nn.Module):
    """The whole network; `Encoding` runs it."""

    opened: tuple[VisionConfig, Checkpoint] | None = None
    """What it was loaded of."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.patch_embedding = Linear(3 * config.patch**2, hidden)
        self.position_embedding = nn.Parameter(torch.empty(2, config.positions, hidden))
        self.blocks = [Block(config) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(self.blocks)
        if config.standardizes:
            self.std_bias = nn.Parameter(torch.empty(hidden))
            self.std_scale = nn.Parameter(torch.empty(hidden))
        self.projection = Linear(hidden, config.text_size)

    def embed(self, pixels: Tensor, columns: int, rows: int) -> tuple[Tensor, Tensor]:
        """pixels [..., patches, 3 · patch²], 0 to 1 → the first layer's input [..., patches,
        hidden], and where each patch is: int64 [patches, 2], its column and its row."""
        x_at, y_at = torch.arange(columns), torch.arange(rows)
        places = torch.stack(torch.meshgrid(x_at, y_at, indexing="xy"), -1).reshape(-1, 2)
        places = places.to(pixels.device)
        table = self.position_embedding
        embedded = self.patch_embedding((2 * (pixels - 0.5)).to(table.dtype))
        return embedded + (table[0][places[:, 0]] + table[1][places[:, 1]]), places

    def soft_tokens(self, x: Tensor, columns: int, rows: int) -> Tensor:
        """The last layer's output [..., patches, hidden] → [..., soft tokens, text size]."""
        config = self.config
        pool, hidden = config.pool, config.hidden_size
        squares = x.view(*x.shape[:-2], rows // pool, pool, columns // pool, pool, hidden)
        # Rounded once to x's dtype, as the reference does; what follows exceeds float16's range.
        pooled = squares.float().mean((-4, -2)).flatten(-3, -2).to(x.dtype).float() * hidden**0.5
        if config.standardizes:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return self.projection(ops.rms_norm(pooled.to(x.dtype), None, config.rms_norm_eps))


class Encoding:
    """One picture on its way through a tower."""

    def __init__(self, tower: VisionTower, pixels: Tensor, columns: int) -> None:
        """pixels: float32 [patches, 3 · patch²], 0 to 1, row by row of `columns` patches."""
        config, rows = tower.config, len(pixels) // columns
        assert rows * columns == len(pixels), "a row of patches is not full"
        assert not columns % config.pool and not rows % config.pool, "a soft token is not full"
        assert max(columns, rows) <= config.positions, "more patches than positions"
        self._tower, self._sides = tower, (columns, rows)
        self._x, places = tower.embed(pixels, *self._sides)
        self._rotary = rotary_of(places, config, self._x.dtype)
        self.layer = 0  # the next one

    def advance(self, layers: int | None = None) -> Tensor | None:
        """Runs the next layers (None: all that are left). The soft tokens [n, text size] where
        these were the last ones; None before. Changes nothing where it raises."""
        count = len(self._tower.layers)
        end = count if layers is None else min(count, self.layer + layers)
        x = self._x
        for block in self._tower.blocks[self.layer : end]:
            x = block(x, self._rotary)
        soft = self._tower.soft_tokens(x, *self._sides) if end == count else None
        self._x, self.layer = x, end
        return soft


def rotary_of(places: Tensor, config: VisionConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [patches, 2, head_dim / 4] of the columns and rows int64 [patches, 2]."""
    half = config.head_dim // 2
    steps = torch.arange(0, half, 2, device=places.device).float() / half
    angles = places.unsqueeze(-1).float() * (1.0 / config.rope_theta**steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _number() -> nn.Parameter:
    return nn.Parameter(torch.empty(()))


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [patches, heads, d]: the first half of d turns with the column, the
    second with the row."""
    halves = x.unflatten(-1, (2, -1)).transpose(-2, -3)
    cos, sin = (each.expand(*halves.shape[:-2], -1) for each in rotary)
    return ops.rotate(halves, cos, sin).transpose(-2, -3).flatten(-2)
