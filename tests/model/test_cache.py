"""Cache slots: their sizes, their rings against plain lists, and their refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import gguf_config
from torch import Tensor

from sfumato.model.cache import KVCache, Slot, slot_bytes, slot_sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [2, 8, 1000])
@pytest.mark.parametrize("capacity", [1, 7, 8, 50])
def test_bytes_are_those_of_the_tensors(capacity: int, window: int, dtype: torch.dtype) -> None:
    config = gguf_config(sliding_window=window)
    slot = Slot(config, capacity, dtype, CPU)
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
    slot = Slot(config, sum(counts) + spare, torch.float32, CPU)
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
    whole = Slot(config, sum(counts) + spare, torch.float32, CPU)
    if counts:  # what a slot holds does not depend on the pieces that it came in
        for index, layer in enumerate(config.layers):
            keys = numbered(0, sum(counts), layer.kv_heads, layer.head_dim)
            whole.write(index, keys, -keys)
        whole.advance(sum(counts))
    for index, parts in enumerate(content):
        for ours, theirs in zip(parts, whole.read(index), strict=True):
            assert torch.equal(ours, theirs)


def test_windows() -> None:
    slot = Slot(gguf_config(sliding_window=9), 20, torch.float32, CPU)
    assert [slot.window(index) for index in range(3)] == [9, 9, None]


def test_reset_forgets_and_keeps_the_memory() -> None:
    config = gguf_config()
    slot = Slot(config, 20, torch.float32, CPU)
    slot.write(0, numbered(0, 5, 2, 16), numbered(0, 5, 2, 16))
    slot.advance(5)
    place = slot.read(0)[0].data_ptr()
    slot.reset()
    assert slot.length == 0 and slot.room() == 20
    assert all(len(slot.read(index)[2]) == 0 for index in range(3))
    slot.write(0, numbered(0, 1, 2, 16), numbered(0, 1, 2, 16))
    slot.advance(1)
    assert slot.read(0)[0].data_ptr() == place and slot.read(0)[2].tolist() == [0]


def test_a_cache_of_rows() -> None:
    cache = KVCache(Slot(gguf_config(), 20, torch.float32, CPU) for _ in range(3))
    cache[1].advance(4)
    assert cache.lengths == [0, 4, 0]
    cache.reset()
    assert cache.lengths == [0, 0, 0]


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_slot_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity: .* got {capacity}"):
        Slot(gguf_config(), capacity, torch.float32, CPU)
