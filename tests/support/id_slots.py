"""A pool of slots without a network: keys and values carry the id of their token.

Slots are real, with a window of 5.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from tests.support.gguf_files import gguf_config

from sfumato.engine.queue.slots import CacheKey, Lease, Media, SlotPool
from sfumato.model.cache import KVPool, Slot, slot_bytes
from sfumato.model.network import Network

CONFIG = gguf_config(sliding_window=5)
CPU = torch.device("cpu")
PLENTY = 1 << 30


def new_slot(capacity: int) -> Slot:
    return new_slots(1, capacity)[0]


def new_slots(count: int, capacity: int) -> list[Slot]:
    return KVPool(CONFIG, count, capacity, torch.float32, CPU).slots()


def pool(
    slots: int = 2,
    context: int = 40,
    strict: bool = False,
    snapshots: int = PLENTY,
    room: float = float("inf"),
) -> SlotPool:
    parts: Any = SimpleNamespace(
        config=CONFIG, cache_dtype=torch.float32, new_slot=new_slot, new_slots=new_slots
    )
    return SlotPool(cast(Network, parts), slots, context, strict, snapshots, lacks(room))


def lacks(room: float) -> Callable[[Sequence[int], int | None], str | None]:
    """Larger slots take `room` bytes at most."""

    def lacks(capacities: Sequence[int], held: int | None) -> str | None:
        need = sum(slot_bytes(CONFIG, n, torch.float32) for n in capacities)
        return None if need <= room else f"takes {need:,} bytes, which is over {room}"

    return lacks


def encode(lease: Lease, ids: Sequence[int]) -> None:
    """Appends ids to the slot, as keys and values that tell them, and says so."""
    for index, layer in enumerate(CONFIG.layers):
        keys = torch.tensor(ids).float()[None, :, None]
        keys = keys.expand(layer.kv_heads, -1, layer.head_dim)
        lease.slot.write(index, keys, -keys)
    lease.slot.advance(len(ids))
    lease.extend(ids)


def stored(slot: Slot) -> list[dict[int, int]]:
    """By layer, the token at each position that it holds."""
    layers = []
    for index in range(len(CONFIG.layers)):
        keys, values, positions = slot.read(index)
        assert torch.equal(keys, -values) and torch.equal(keys, keys[:1, :, :1].expand_as(keys))
        layers.append(dict(zip(positions.tolist(), keys[0, :, 0].int().tolist(), strict=True)))
    return layers


def expected(ids: Sequence[int]) -> list[dict[int, int]]:
    full = dict(enumerate(ids))
    window = {p: token for p, token in full.items() if p >= len(ids) - 4}
    return [window, window, full]


def key(
    ids: Sequence[int],
    family: str = "tiny",
    adapter: int = 0,
    media: tuple[Media, ...] = (),
) -> CacheKey:
    array_ids = ids if isinstance(ids, array) else array("i", ids)  # rows keep arrays
    return CacheKey(family, adapter, array_ids, media)


def serve(
    pool: SlotPool,
    ids: Sequence[int],
    reply: Sequence[int] = (),
    need: int = 40,
    **content: Any,
) -> Lease:
    """Leases, encodes with its stops, marks the end as well, and appends a reply."""
    lease = pool.lease(key(ids, **content), need, marks=(len(ids),))
    assert lease is not None
    assert stored(lease.slot) == expected(ids[: lease.cached])
    prefill(pool, lease, ids)
    encode(lease, reply)
    return lease


def prefill(pool: SlotPool, lease: Lease, ids: Sequence[int]) -> None:
    at = lease.cached
    for stop in lease.marks:
        encode(lease, ids[at:stop])
        pool.mark(lease)
        at = stop
    encode(lease, ids[at:])
