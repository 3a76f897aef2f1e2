"""The KV cache: one slot per row, each with the keys and values of every layer.

Full layers keep all positions.  Sliding layers keep the last `window - 1` in a ring in which
position p lives at p mod size, so that what a slot holds depends on its tokens alone and not on
the chunks in which they came.  Knows no requests: who owns a slot is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.model.config import ModelConfig


def slot_sizes(config: ModelConfig, capacity: int) -> list[int]:
    """How many positions each layer of a slot holds."""
    # A token looks at `window - 1` earlier ones, itself being the last of its window.
    ring = max(1, min(capacity, config.sliding_window - 1))
    return [ring if layer.sliding else capacity for layer in config.layers]


def slot_bytes(config: ModelConfig, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of one slot: keys and values of all layers."""
    sizes = slot_sizes(config, capacity)
    numbers = sum(
        2 * size * layer.kv_heads * layer.head_dim
        for size, layer in zip(sizes, config.layers, strict=True)
    )
    return numbers * dtype.itemsize


class Slot:
    """The prefix of one row: up to `capacity` positions, `length` of them filled."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: a cache slot holds at least 1 position, got {capacity}")
        self.capacity, self.length = capacity, 0
        self._layers, self._window = config.layers, config.sliding_window
        self._keys, self._values = (
            [
                torch.zeros(layer.kv_heads, size, layer.head_dim, dtype=dtype, device=device)
                for size, layer in zip(slot_sizes(config, capacity), config.layers, strict=True)
            ]
            for _ in range(2)
        )

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, the token itself included; None on full layers."""
        return self._window if self._layers[layer].sliding else None

    def reset(self) -> None:
        """Forgets the prefix; the memory stays."""
        self.length = 0

    def room(self) -> int:
        """How many more positions fit."""
        return self.capacity - self.length

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [kv_heads, held, d] (views), and their positions int64 [held]."""
        keys, values = self._keys[layer], self._values[layer]
        size = keys.shape[1]
        held = min(self.length, size)
        places = torch.arange(held, device=keys.device)
        # In a ring, place i holds the last position p < length with p mod size = i.
        positions = self.length - 1 - (self.length - 1 - places) % size
        return keys[:, :held], values[:, :held], positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [kv_heads, n, d] of the positions from `length` on.

        All layers write before `advance` moves the length; a forward that fails in between
        leaves sliding layers overwritten, so its slot must be reset.
        """
        size, count = self._keys[layer].shape[1], keys.shape[1]
        kept = min(count, size)
        end = self.length + count
        places = torch.arange(end - kept, end, device=keys.device) % size
        self._keys[layer][:, places] = keys[:, count - kept :].to(self._keys[layer].dtype)
        self._values[layer][:, places] = values[:, count - kept :].to(self._values[layer].dtype)

    def advance(self, count: int) -> None:
        """Makes `count` written positions part of the prefix."""
        self.length += count

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values))


class KVCache(list[Slot]):
    """The slots of a batch of rows."""

    @property
    def lengths(self) -> list[int]:
        """The prefix length of every row."""
        return [slot.length for slot in self]

    def reset(self) -> None:
        """Forgets every row's prefix."""
        for slot in self:
            slot.reset()
