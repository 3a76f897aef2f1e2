"""Keys and values of questions at addresses that stay: the second prefix of reads on a device.

A question leases places one after another, of all layers alike, for as long as it is read.  One
that finds none may have a pool for itself.  Knows no slots and no reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.model.model_config import ModelConfig
from sfumato.ops.narrow_cache import as_bytes, stored_as, stored_width

GRAIN = 16
"""Places that are leased are a multiple of it, so that few gaps are too small for a question."""

MOST = 4096
"""Places of a pool at most, 0.9 GB of the 26B-A4B."""


class Span:
    """Places that are leased until this object is gone."""

    def __init__(self, pool: QuestionPool, start: int, places: int) -> None:
        self.pool, self.start, self.places = pool, start, places
        end = weakref.finalize(self, pool.released.append, start)
        end.atexit = False


class QuestionPool:
    """The places of one network. Not for several threads, but for the end of leases."""

    def __init__(
        self,
        config: ModelConfig,
        places: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """longest: tokens of a question that may lease places."""
        assert 0 < places <= MOST, f"places: must lie in 1..{MOST}, got {places}"
        self.places, self.longest, self.device = places, longest, device
        self._config, self._dtype = config, dtype
        shapes = [
            (layer.kv_heads, places, stored_width(layer.head_dim, dtype)) for layer in config.layers
        ]
        self.keys, self.values = (  # of each layer [kv_heads, places, stored_width]
            [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)
        )
        self._leased: dict[int, int] = {}  # places, by the first of them
        self.released: list[int] = []  # first places; any thread may end a lease

    def lease(self, tokens: int) -> Span | None:
        """Places for so many tokens, the first ones that are free; None where there are none, or
        the question is longer than those that get places."""
        while self.released:
            del self._leased[self.released.pop()]
        wanted = -(-tokens // GRAIN) * GRAIN
        if not 0 < tokens <= self.longest or wanted > self.places:
            return None
        start = 0
        for first, count in sorted(self._leased.items()):
            if first - start >= wanted:
                break
            start = first + count
        if start + wanted > self.places:
            return None
        self._leased[start] = wanted
        return Span(self, start, wanted)

    def for_one(self, tokens: int) -> QuestionPool:
        """A pool for one question of so many tokens, where this one has no places left."""
        assert 0 < tokens <= self.longest
        places = -(-tokens // GRAIN) * GRAIN
        return QuestionPool(self._config, places, self.longest, self._dtype, self.device)

    def write(self, at: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Stores keys and values of tokens, of every layer [tokens, kv_heads, head_dim], at places
        int64 [tokens]."""
        for keys, values, (k, v) in zip(self.keys, self.values, parts, strict=True):
            for held, new in ((keys, k), (values, v)):
                stored = stored_as(new.transpose(0, 1), held.dtype)
                as_bytes(held).index_copy_(1, at, as_bytes(stored))


def pool_bytes(config: ModelConfig, places: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each of its tensors."""
    sizes = [
        layer.kv_heads * places * stored_width(layer.head_dim, dtype) for layer in config.layers
    ]
    return [size * dtype.itemsize for size in sizes for _ in range(2)]
