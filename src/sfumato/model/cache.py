"""The KV cache: pools of slots, one slot per row, with the keys and values of every layer; and
pools of questions, whose keys and values stand beside the slots.

The slots of a pool are slices of one tensor per layer, and their lengths stand in a tensor on the
device, so that attention takes all rows in one call.

Full layers store all positions.  Sliding layers store the last `window - 1` in a ring, in which
position p stands at p mod size, so that what a slot holds depends on its tokens alone and not on
the chunks in which they came.  A full ring overwrites the oldest position with each new one: a
shorter prefix is usable again only with a snapshot of the windows that was taken at its length.

A question leases places one after another, of all layers alike, for as long as it is read: their
addresses stay.  One that finds none may have a pool for itself.  Knows no requests: the engine
decides which request has which slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.model.model_config import Blocks, LayerConfig, ModelConfig
from sfumato.ops.attention_reference import KEYS, NOWHERE
from sfumato.ops.narrow_cache import as_bytes, is_narrow, stored_as, stored_width
from sfumato.refused import Refused

BLOCK = KEYS  # keys that torch's attention sums at a time; compiled attention sums half


def slot_sizes(config: ModelConfig, capacity: int) -> list[int]:
    """How many positions each layer of a slot holds."""
    # A token looks at `window - 1` earlier ones, itself being the last of its window.
    ring = max(1, min(capacity, config.sliding_window - 1))
    return [ring if layer.sliding else capacity for layer in config.layers]


def key_bytes(layer: LayerConfig, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the keys of so many positions of a layer; those of the values are as many."""
    return layer.kv_heads * positions * stored_width(layer.head_dim, dtype) * dtype.itemsize


def slot_bytes(config: ModelConfig, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of one slot: keys and values of all layers."""
    sizes = zip(config.layers, slot_sizes(config, capacity), strict=True)
    return sum(2 * key_bytes(layer, size, dtype) for layer, size in sizes)


@dataclass(frozen=True)
class Snapshot:
    """What the sliding layers of a slot held at a length, on the slot's device: the host would wait
    for a copy to its own memory."""

    length: int
    rings: tuple[Tensor, ...]  # of each sliding layer keys, then values: [kv_heads, held, d]

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)


def snapshot_bytes(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
    """Bytes of the snapshot of a slot that holds `length` positions."""
    held = min(length, config.sliding_window - 1)
    return sum(2 * key_bytes(layer, held, dtype) for layer in config.layers if layer.sliding)


class KVPool:
    """The memory of slots of one capacity: they are slices of one tensor per layer."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[torch.device] | None = None,
    ) -> None:
        """layers: the device of each layer's keys and values, None for that of the pool, which has
        the lengths."""
        if capacity < 1:
            raise Refused("capacity", f"a cache slot holds at least 1 position, got {capacity}")
        self.capacity, self.device = capacity, device
        self.layers, self.sliding_window = config.layers, config.sliding_window
        self.block = config.block  # positions of a block of the encode phase; None: 1
        shapes = [
            (slots, layer.kv_heads, size, stored_width(layer.head_dim, dtype))
            for size, layer in zip(slot_sizes(config, capacity), config.layers, strict=True)
        ]
        devices = [device] * len(shapes) if layers is None else layers
        self.keys, self.values = (  # of each layer [slots, kv_heads, size, stored_width]
            [
                torch.zeros(shape, dtype=dtype, device=at)
                for shape, at in zip(shapes, devices, strict=True)
            ]
            for _ in range(2)
        )
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.held = [0] * slots  # the same on the host, so that reading a length is no wait
        self.offsets = [0] * slots  # of each slot; see `Slot.offset`
        # The number of each slot's adapter, 0 for none, here and on the device.
        self.adapters = torch.zeros(slots, dtype=torch.int64, device=device)
        self.adapted = [0] * slots

    def __len__(self) -> int:
        return len(self.held)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, the token itself included; None on full layers."""
        return self.sliding_window if self.layers[layer].sliding else None

    def slots(self) -> list[Slot]:
        """All slots, in order. All objects of one number share contents and length."""
        return [Slot(self, index) for index in range(len(self))]

    def set_length(self, index: int, length: int) -> None:
        """Changes the length of a slot here and on the device."""
        self.held[index] = length
        self.lengths[index].fill_(length)


class Slot:
    """The prefix of one row: up to `capacity` positions of a pool, `length` of them filled."""

    def __init__(self, pool: KVPool, index: int) -> None:
        # The pool does not hold its slots: a cycle would keep their memory until it is collected.
        self.pool, self.index, self.capacity = pool, index, pool.capacity
        self._keys = [keys[index] for keys in pool.keys]  # views [kv_heads, size, d]
        self._values = [values[index] for values in pool.values]

    @property
    def length(self) -> int:
        return self.pool.held[self.index]

    @length.setter
    def length(self, length: int) -> None:
        self.pool.set_length(self.index, length)

    @property
    def offset(self) -> int:
        """Where the blocks of the encode phase begin: at the positions that are `offset` modulo the
        size of a block; the tokens before `offset` are a block of their own. 0 in an empty slot,
        and of no meaning where there are no blocks."""
        return self.pool.offsets[self.index]

    @offset.setter
    def offset(self, offset: int) -> None:
        assert not self.length and 0 <= offset < (self.pool.block or 1)
        self.pool.offsets[self.index] = offset

    @property
    def adapter(self) -> int:
        """The number of the adapter that the prefix is encoded with and the row is served by; 0:
        none. Who leases the slot sets it, while the slot is empty."""
        return self.pool.adapted[self.index]

    @adapter.setter
    def adapter(self, number: int) -> None:
        if number != self.adapter:
            assert not self.length, "a prefix is of one adapter"
            self.pool.adapted[self.index] = number
            self.pool.adapters[self.index].fill_(number)

    def reset(self) -> None:
        """Empties the prefix; the memory and the adapter stay."""
        self.length = 0
        self.offset = 0

    def room(self) -> int:
        """How many positions are free."""
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

    def history(self, layer: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Keys and values in order of their positions, in parts [kv_heads, n, d], and the
        positions int64 [all n].

        Zeros at a position that no token sees stand for what a ring has overwritten of the first
        block: sums over blocks of keys are then the same wherever a chunk begins.
        """
        keys, values, positions = self.read(layer)
        start = self.length - keys.shape[1]
        if start == 0:
            return [keys], [values], positions
        first = start % keys.shape[1]  # where the oldest position stands
        gap = start % BLOCK
        zeros = keys.new_zeros(keys.shape[0], 1, keys.shape[2]).expand(-1, gap, -1)
        ordered = (positions[first:], positions[:first])
        unseen = positions.new_full((gap,), NOWHERE)
        return (
            [zeros, keys[:, first:], keys[:, :first]],
            [zeros, values[:, first:], values[:, :first]],
            torch.cat((unseen, *ordered)),
        )

    def narrowed(self, layer: int, values: Tensor) -> Tensor:
        """New keys or values [kv_heads, n, d] of a layer as a narrow cache stores them, for later
        chunks: results then do not depend on where a chunk begins. Else as they are."""
        dtype = self._keys[layer].dtype
        return stored_as(values, dtype) if is_narrow(dtype) else values

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values of the positions from `length` on, [kv_heads, n, d] or
        `narrowed`.

        All layers write before `advance` moves the length; a forward that fails in between
        leaves sliding layers overwritten, so its slot must be reset.
        """
        size, count = self._keys[layer].shape[1], keys.shape[1]
        stored = min(count, size)
        end = self.length + count
        places = torch.arange(end - stored, end, device=keys.device) % size
        for held, new in ((self._keys[layer], keys), (self._values[layer], values)):
            last = new[:, count - stored :]
            if last.dtype != held.dtype:  # rounding twice could change what was seen
                last = stored_as(last, held.dtype)
            as_bytes(held)[:, places] = as_bytes(last)

    def advance(self, count: int) -> None:
        """Makes `count` written positions part of the prefix."""
        self.length += count

    def whole_blocks(self, count: int, most: int) -> int:
        """How many of the next `most` tokens to encode at once, see `Blocks.together`."""
        return Blocks(self.pool.block or 1, self.offset).together(self.length, count, most)

    def holds(self, length: int) -> bool:
        """Whether the first `length` positions can be used without a snapshot: the slot has
        them, and no ring has overwritten a position that the end of that prefix sees."""
        return length == self.length or length < self.length <= self._ring()

    def snapshot(self) -> Snapshot:
        """A copy of the sliding layers' windows at this length."""
        held = min(self.length, self._ring())
        rings = (ring[:, :held].clone() for ring in self._of(sliding=True))
        return Snapshot(self.length, tuple(rings))

    def restore(self, source: Slot, length: int, snapshot: Snapshot | None = None) -> None:
        """Makes the prefix that of the source's first `length` positions, which may be this very
        slot's. The snapshot is of a slot that held the same tokens at that length; None where the
        source still holds their windows. Raises ValueError where positions or windows are missing.
        """
        if length > min(self.capacity, source.length):
            raise Refused(
                "length",
                f"{length} positions of a source that holds {source.length} do not fit a cache "
                f"slot of {self.capacity}",
            )
        if snapshot is None and not source.holds(length):
            raise Refused("snapshot", f"the source needs that of its windows at {length}")
        if snapshot is not None and snapshot.length != length:
            raise Refused("snapshot", f"was taken at {snapshot.length}, wanted is {length}")
        same = source.pool is self.pool and source.index == self.index
        offset, adapter = source.offset, source.adapter
        self.reset()  # until all is copied: a copy that fails leaves an empty slot
        self.offset, self.adapter = offset, adapter
        if not same:
            for target, stored in zip(
                self._of(sliding=False), source._of(sliding=False), strict=True
            ):
                target[:, :length] = stored[:, :length]
        if snapshot is not None or not same:
            # Rings of different sizes agree on the places of all that the smaller can hold.
            held = min(length, self._ring())
            rings = source._of(sliding=True) if snapshot is None else snapshot.rings
            for target, stored in zip(self._of(sliding=True), rings, strict=True):
                target[:, :held] = stored[:, :held]
        self.length = length

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values))

    def _ring(self) -> int:
        """How many positions a sliding layer holds; the capacity where there is no such layer."""
        return min((keys.shape[1] for keys in self._keys), default=self.capacity)

    def _of(self, sliding: bool) -> list[Tensor]:
        """Keys and values of the layers of one kind."""
        each = zip(self.pool.layers, self._keys, self._values, strict=True)
        return [x for layer, *both in each if layer.sliding == sliding for x in both]


def adapters_of(slots: Iterable[Slot]) -> frozenset[int]:
    """The numbers of the adapters that some slots have, 0 left aside."""
    return frozenset(slot.adapter for slot in slots) - {0}


class KVCache(list[Slot]):
    """The slots of a batch of rows."""

    @property
    def lengths(self) -> list[int]:
        """The prefix length of every row."""
        return [slot.length for slot in self]

    def reset(self) -> None:
        """Empties every row's prefix."""
        for slot in self:
            slot.reset()


GRAIN = 16
"""Places that are leased are a multiple of it, so that few gaps are too small for a question."""

MOST = 4096
"""Places of a pool at most, 0.9 GB of the 26B-A4B."""


class PoolLease:
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
        shapes = [(layer.kv_heads, places, layer.head_dim) for layer in config.layers]
        self.keys, self.values = (  # of each layer [kv_heads, places, head_dim]
            [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)
        )
        self._leased: dict[int, int] = {}  # places, by the first of them
        self.released: list[int] = []  # first places; any thread may end a lease

    def lease(self, tokens: int) -> PoolLease | None:
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
        return PoolLease(self, start, wanted)

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
                held.index_copy_(1, at, new.transpose(0, 1).to(held.dtype))


def pool_bytes(config: ModelConfig, places: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each of its tensors."""
    return [key_bytes(layer, places, dtype) for layer in config.layers for _ in range(2)]
