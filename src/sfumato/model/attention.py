"""Attention: the projections of one layer, and which keys a token sees in each phase.

The phases share the projections.  They differ in where keys and values come from and go to, and
that is an `Attend`: the kinds here use the cache and serve inference, on packed tokens of several
rows; training has its own, on padded batches with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.cache import KVPool, Slot
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


@dataclass(frozen=True)
class EncodeRows:
    """Causal attention that writes: packed tokens of several rows, `counts[i]` new ones that
    follow the prefix of `slots[i]`. Each token sees that prefix and itself.

    One row after another keeps attention free of padding and masks between rows, and makes a
    row's result independent of the other rows.
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        rows = zip(*(x.split(list(self.counts)) for x in (q, k, v)), strict=True)
        for slot, (rq, rk, rv) in zip(self.slots, rows, strict=True):
            rk, rv = rk.transpose(0, 1), rv.transpose(0, 1)
            old_k, old_v, old_positions = slot.history(layer)
            new = torch.arange(slot.length, slot.length + len(rq), device=q.device)
            causal = ops.Causal(new, torch.cat((old_positions, new)), slot.window(layer))
            # Where the cache is narrow, as later chunks will read them.
            rk, rv = slot.narrowed(layer, rk), slot.narrowed(layer, rv)
            outs.append(ops.attend(rq, (*old_k, rk), (*old_v, rv), causal))
            slot.write(layer, rk, rv)
        return torch.cat(outs)


@dataclass(frozen=True)
class CanvasPart:
    """Canvases of one width whose prefixes stand in one pool.

    Its tensors may keep their addresses from step to step; a forward reads the lengths of the
    prefixes from the pool.
    """

    pool: KVPool
    slots: Tensor  # int64 [rows]
    width: int  # positions of a row
    lengths: Tensor  # int64 [rows]: how many of them, the first ones, are its canvas
    index: Tensor | None = None
    """int64 [tokens], rising: which of the rows · width positions are among the packed tokens;
    None: all. Every position that is left out lies beyond its canvas's length."""

    @property
    def tokens(self) -> int:
        """How many packed tokens the part has."""
        return len(self.slots) * self.width if self.index is None else len(self.index)


class CanvasRows:
    """Attention of canvases, which reads only: each position sees its prefix and all its canvas.

    The packed tokens are those of the parts, one part after another.  One operation serves a
    layer and part, whatever the number of rows.  On sliding layers every position sees the same
    last `window - 1` prefix positions, which is exactly what a slot stores, so no mask is needed.
    Each forward needs a new object, since the object reads the prefix lengths when it is made.
    """

    def __init__(self, parts: Sequence[CanvasPart]) -> None:
        self.parts = tuple(parts)
        self._sizes = [part.tokens for part in parts]
        self._held = [_held(part) for part in parts]
        self._elsewhere: dict[torch.device, list[tuple[CanvasPart, dict[int, Tensor]]]] = {}

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        return _joined([_positions(part) for part in self.parts])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = zip(*(x.split(self._sizes) for x in (q, k, v)), strict=True)
        outs = []
        for (part, held), tensors in zip(self._on(q.device), split, strict=True):
            stored = part.pool.keys[layer], part.pool.values[layer]
            places = part.slots, held[stored[0].shape[2]], part.lengths
            arguments = [*(_padded(part, x) for x in tensors), *stored, *places]
            out = ops.canvas_attention(*arguments).flatten(0, 1)
            outs.append(out if part.index is None else out.index_select(0, part.index))
        return _joined(outs)

    def _on(self, device: torch.device) -> list[tuple[CanvasPart, dict[int, Tensor]]]:
        """Each part, and what layers hold of its rows, with their tensors on a layer's device."""
        if all(part.slots.device == device for part in self.parts):
            return list(zip(self.parts, self._held, strict=True))
        if device not in self._elsewhere:
            self._elsewhere[device] = [
                (_part_on(part, device), {size: x.to(device) for size, x in held.items()})
                for part, held in zip(self.parts, self._held, strict=True)
            ]
        return self._elsewhere[device]


def _part_on(part: CanvasPart, device: torch.device) -> CanvasPart:
    index = None if part.index is None else part.index.to(device)
    return CanvasPart(part.pool, part.slots.to(device), part.width, part.lengths.to(device), index)


def _held(part: CanvasPart) -> dict[int, Tensor]:
    """How many positions of each row's prefix a layer holds, int64 [rows], by the layer's size."""
    lengths = part.pool.lengths.index_select(0, part.slots)
    return {size: lengths.clamp(max=size) for size in {keys.shape[2] for keys in part.pool.keys}}


def _positions(part: CanvasPart) -> Tensor:
    first = part.pool.lengths.index_select(0, part.slots)
    places = torch.arange(part.width, device=first.device)
    positions = (first[:, None] + places).flatten()
    return positions if part.index is None else positions.index_select(0, part.index)


def _padded(part: CanvasPart, packed: Tensor) -> Tensor:
    """[tokens, heads, d] → [rows, width, heads, d], zeros where no token stands."""
    if part.index is not None:
        rows = packed.new_zeros(len(part.slots) * part.width, *packed.shape[1:])
        packed = rows.index_copy_(0, part.index, packed)
    return packed.unflatten(0, (-1, part.width))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
