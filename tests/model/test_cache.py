"""Cache slots: their sizes, their rings against plain lists, and their refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import gguf_config
from torch import Tensor

from sfumato.model.cache import (
    BLOCK,
    KVCache,
    KVPool,
    Slot,
    slot_bytes,
    slot_sizes,
    snapshot_bytes,
)
from sfumato.model.model_config import ModelConfig
from sfumato.ops.attention_reference import NOWHERE

CPU = torch.device("cpu")


def new_pool(
    config: ModelConfig, slots: int, capacity: int, dtype: torch.dtype = torch.float32
) -> KVPool:
    return KVPool(config, slots, capacity, dtype, CPU)


def new_slot(config: ModelConfig, capacity: int, dtype: torch.dtype = torch.float32) -> Slot:
    """The middle one of a pool of three."""
    return Slot(new_pool(config, 3, capacity, dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [2, 8, 1000])
@pytest.mark.parametrize("capacity", [1, 7, 8, 50])
def test_bytes_are_those_of_the_tensors(capacity: int, window: int, dtype: torch.dtype) -> None:
    config = gguf_config(sliding_window=window)
    slot = new_slot(config, capacity, dtype)
    ring = min(capacity, window - 1)
    assert slot_sizes(config, capacity) == [ring, ring, capacity]
    # Keys and values; 2 heads of 16 on the two sliding layers, 1 head of 32 on the full one.
    numbers = 2 * (2 * ring * 2 * 16 + capacity * 32)
    assert slot_bytes(config, capacity, dtype) == slot.nbytes() == numbers * dtype.itemsize


def numbered(first: int, count: int, heads: int, width: int) -> Tensor:
    """Keys [heads, count, width] that all carry their position's number."""
    return torch.arange(first, first + count).float()[None, :, None].expand(heads, -1, width)


@settings(max_examples=100)
@given(
    window=st.integers(2, 12),
    counts=st.lists(st.integers(1, 25), max_size=12),
    spare=st.integers(1, 5),
)
def test_rings_hold_the_last_positions(window: int, counts: list[int], spare: int) -> None:
    """Against a list to which everything is appended."""
    config = gguf_config(sliding_window=window)
    slot = new_slot(config, sum(counts) + spare)
    for count in counts:
        before = slot.length
        for index, layer in enumerate(config.layers):
            keys = numbered(before, count, layer.kv_heads, layer.head_dim)
            slot.write(index, keys, -keys)
        assert slot.length == before
        slot.advance(count)
        for index, layer in enumerate(config.layers):
            history = list(range(slot.length))
            expected = history[-(window - 1) :] if layer.sliding else history
            keys, values, positions = slot.read(index)
            assert sorted(positions.tolist()) == expected
            assert keys.shape == values.shape == (layer.kv_heads, len(expected), layer.head_dim)
            assert torch.equal(keys, positions.float()[None, :, None].expand_as(keys))
            assert torch.equal(values, -keys)
    assert slot.room() == spare
    content = [slot.read(index) for index in range(3)]
    at_once = new_slot(config, sum(counts) + spare)
    if counts:  # what a slot holds does not depend on the pieces that it came in
        for index, layer in enumerate(config.layers):
            keys = numbered(0, sum(counts), layer.kv_heads, layer.head_dim)
            at_once.write(index, keys, -keys)
        at_once.advance(sum(counts))
    for index, parts in enumerate(content):
        for ours, theirs in zip(parts, at_once.read(index), strict=True):
            assert torch.equal(ours, theirs)


def fill(slot: Slot, config: ModelConfig, count: int) -> None:
    for index, layer in enumerate(config.layers):
        keys = numbered(slot.length, count, layer.kv_heads, layer.head_dim)
        slot.write(index, keys, -keys)
    slot.advance(count)


def filled(config: ModelConfig, capacity: int, count: int) -> Slot:
    slot = new_slot(config, capacity)
    fill(slot, config, count)
    return slot


def assert_equal(ours: Slot, theirs: Slot) -> None:
    for slot in (ours, theirs):  # on the device as on the host, and no other slot's
        assert slot.pool.lengths.tolist() == [0, slot.length, 0]
    assert ours.length == theirs.length
    for index in range(3):
        for a, b in zip(ours.read(index), theirs.read(index), strict=True):
            assert torch.equal(a, b)


@given(window=st.integers(2, 12), length=st.integers(0, 25), at=st.integers(0, 25))
def test_a_prefix_can_be_shortened_until_a_ring_overwrites(
    window: int, length: int, at: int
) -> None:
    config = gguf_config(sliding_window=window)
    slot = filled(config, 40, length)
    usable = at == length or at < length < window
    assert slot.holds(at) == usable
    if not usable:
        with pytest.raises(
            ValueError, match=f"needs that of its windows at {at}" if at <= length else "do not fit"
        ):
            slot.restore(slot, at)
    else:
        slot.restore(slot, at)
        assert_equal(slot, filled(config, 40, at))


@given(
    window=st.integers(2, 12),
    at=st.integers(1, 25),
    further=st.integers(0, 25),
    capacity=st.integers(1, 60),
    after=st.integers(0, 20),
)
def test_a_snapshot_brings_a_prefix_back(
    window: int, at: int, further: int, capacity: int, after: int
) -> None:
    """In the slot itself and in another, of any capacity that holds it; and so does the source
    itself, as long as it holds its windows."""
    config = gguf_config(sliding_window=window)
    source = filled(config, 50, at)
    snapshot = source.snapshot()
    assert snapshot.nbytes == snapshot_bytes(config, at, torch.float32)
    fill(source, config, further)
    targets = [(new_slot(config, max(capacity, at + after)), snapshot)]
    if source.holds(at):
        targets.append((new_slot(config, max(capacity, at + after)), None))
    targets.append((source, snapshot))
    for slot, windows in targets:
        slot.restore(source, at, windows)
        fill(slot, config, min(after, slot.room()))
        assert_equal(slot, filled(config, 70, slot.length))


@given(window=st.integers(2, 600), length=st.integers(0, 700))
def test_history_is_in_order_and_in_whole_blocks(window: int, length: int) -> None:
    """What is not in a ring any more is at no position that is seen, so that places stay those of
    the positions, modulo a block."""
    config = gguf_config(sliding_window=window)
    slot = filled(config, 800, length)
    for index, layer in enumerate(config.layers):
        keys, values, positions = slot.history(index)
        places = torch.arange(len(positions))
        seen = positions != NOWHERE
        kept = positions[seen]
        held = min(length, window - 1) if layer.sliding else length
        assert kept.tolist() == list(range(length - held, length))
        assert torch.equal(kept % BLOCK, places[seen] % BLOCK)
        for parts, sign in ((keys, 1), (values, -1)):
            joined = torch.cat(parts, dim=1)
            assert joined.shape == (layer.kv_heads, len(positions), layer.head_dim)
            expected = torch.where(seen, sign * positions, 0).float()
            assert torch.equal(joined, expected[None, :, None].expand_as(joined))


def test_what_cannot_be_restored() -> None:
    config = gguf_config(sliding_window=4)
    source, small = filled(config, 20, 9), new_slot(config, 5)
    for length in (10, 6):
        with pytest.raises(ValueError, match=f"length: {length} positions of a source .* of 5"):
            small.restore(source, length, source.snapshot())
    with pytest.raises(ValueError, match=r"snapshot: .* at 5"):
        small.restore(source, 5)
    with pytest.raises(ValueError, match="snapshot: was taken at 9, wanted is 5"):
        small.restore(source, 5, source.snapshot())


def test_windows() -> None:
    slot = new_slot(gguf_config(sliding_window=9), 20)
    assert [slot.pool.window(index) for index in range(3)] == [9, 9, None]


def test_slots_of_a_pool_are_views_and_share_nothing() -> None:
    config = gguf_config(sliding_window=6)
    pool = new_pool(config, 3, 20)
    first, last = Slot(pool, 0), pool.slots()[2]
    fill(first, config, 9)
    snapshot = first.snapshot()
    fill(first, config, 3)
    last.restore(first, 9, snapshot)  # within the pool, and onto itself
    first.restore(Slot(pool, 0), 9, snapshot)
    assert pool.lengths.tolist() == [9, 0, 9]
    assert pool.lengths.dtype == torch.int64
    for keys, values in zip(pool.keys, pool.values, strict=True):
        assert keys.shape[0] == values.shape[0] == 3
        assert not keys[1].any() and torch.equal(keys[0, :, :5], keys[2, :, :5])
    expected = filled(config, 20, 9)
    for slot in (first, last):
        for index in range(3):
            for ours, theirs in zip(slot.read(index), expected.read(index), strict=True):
                assert torch.equal(ours, theirs)
    Slot(pool, 2).reset()
    assert (last.length, pool.lengths.tolist()) == (0, [9, 0, 0])


def test_reset_forgets_and_keeps_the_memory() -> None:
    config = gguf_config()
    slot = new_slot(config, 20)
    slot.write(0, numbered(0, 5, 2, 16), numbered(0, 5, 2, 16))
    slot.advance(5)
    place = slot.read(0)[0].data_ptr()
    slot.reset()
    assert slot.length == 0 and slot.room() == 20
    assert all(len(slot.read(index)[2]) == 0 for index in range(3))
    slot.write(0, numbered(0, 1, 2, 16), numbered(0, 1, 2, 16))
    slot.advance(1)
    assert slot.read(0)[0].data_ptr() == place and slot.read(0)[2].tolist() == [0]


@pytest.mark.parametrize("count", [1, 9])
def test_what_an_earlier_request_left_is_never_read(count: int) -> None:
    config = gguf_config(sliding_window=6)
    slot = filled(config, 20, 20)
    for stored in (*slot.pool.keys, *slot.pool.values):
        stored.fill_(float("nan"))
    slot.reset()
    fill(slot, config, count)
    for index in range(len(config.layers)):
        for parts in slot.history(index)[:2]:
            assert all(part.isfinite().all() for part in parts)


def test_a_cache_of_rows() -> None:
    cache = KVCache(new_pool(gguf_config(), 3, 20).slots())
    cache[1].advance(4)
    assert cache.lengths == [0, 4, 0]
    cache.reset()
    assert cache.lengths == [0, 0, 0]


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_slot_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity: .* got {capacity}"):
        new_slot(gguf_config(), capacity)
