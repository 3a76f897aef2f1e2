"""Slots larger than the pool's: made where memory allows, kept for the next turn, given up."""

from __future__ import annotations

import pytest
import torch
from tests.support.id_slots import (
    CONFIG,
    key,
    pool,
    serve,
)

from sfumato.engine import TooLarge
from sfumato.model.cache import Slot, slot_bytes


def test_strict_refuses_what_does_not_fit_a_slot() -> None:
    slots = pool(strict=True)
    assert slots.lease(key([1]), 40) is not None
    with pytest.raises(
        TooLarge, match=r"a context of 41 tokens and slots have 40; raise --context"
    ):
        slots.lease(key([1]), 41)
    assert [view.busy for view in slots.states({})] == [True, False]


def test_a_larger_slot_is_made_and_kept_for_the_next_turn() -> None:
    slots = pool()
    prompt = list(range(60))
    slots.release(serve(slots, prompt[:20]), keep=True)
    lease = serve(slots, prompt, need=70)
    assert (lease.slot.capacity, lease.cached, lease.allocated) == (80, 20, False)
    assert slots.states({})[lease.index].larger and slots.larger_bytes == lease.slot.nbytes()
    slots.release(lease, keep=True)
    again = serve(slots, [*prompt, 1], need=75)
    assert (again.index, again.cached, again.allocated) == (lease.index, 60, True)


def test_a_larger_slot_needs_memory() -> None:
    small, large = (slot_bytes(CONFIG, n, torch.float32) for n in (50, 60))
    slots = pool(slots=3, room=large)
    with pytest.raises(
        TooLarge,
        match=r"61 tokens, slots have 40; a larger one takes [\d,]+ bytes, which is over",
    ):
        slots.lease(key([1]), 61)
    first = slots.lease(key([1]), 50)  # without room to spare: 80 positions would not fit
    assert first and first.slot.capacity == 50
    assert slots.lease(key([2]), 50) is None  # two would not fit
    slots.release(first, keep=True)
    second = slots.lease(key([2]), 60)  # the idle one makes room
    assert second and second.slot.capacity == 60
    assert slots.larger_bytes == large > small
    assert [view.context for view in slots.states({})] == [40, 40, 40, 60]


def test_the_longest_slot_that_can_be_had() -> None:
    large = slot_bytes(CONFIG, 60, torch.float32)
    most = next(n for n in range(60, 999) if slot_bytes(CONFIG, n + 1, torch.float32) > large)
    assert pool(strict=True).longest == 40
    assert pool(room=0).longest == 40
    assert pool(room=large).longest == most
    assert pool().longest == CONFIG.context_length


def test_an_idle_larger_slot_stays_where_giving_it_up_would_not_help() -> None:
    both = slot_bytes(CONFIG, 80, torch.float32) + slot_bytes(CONFIG, 50, torch.float32)
    slots = pool(slots=3, room=both)
    busy = slots.lease(key([1] * 60), 80)
    idle = serve(slots, [2] * 45, need=50)
    slots.release(idle, keep=True)
    assert busy and slots.lease(key([3]), 60) is None
    assert [view.context for view in slots.states({})] == [40, 40, 40, 80, 50]
    assert serve(slots, [2] * 45, need=50).cached == 45


def test_what_never_fits_is_told_in_numbers() -> None:
    slots = pool(room=999)
    need = slot_bytes(CONFIG, 41, torch.float32)
    with pytest.raises(
        TooLarge, match=f"a larger one takes {need:,} bytes, which is over 999; lower"
    ):
        slots.check(41)
    slots.check(40)


def test_a_device_without_the_memory_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = pool()

    def full(capacity: int) -> Slot:
        raise torch.OutOfMemoryError("device is full")

    monkeypatch.setattr(slots._network, "new_slot", full)
    busy = slots.lease(key([1]), 40)
    assert busy and slots.lease(key([2]), 50) is None
    slots.release(busy, keep=True)
    with pytest.raises(TooLarge, match="50 tokens"):
        slots.lease(key([2]), 50)


def test_a_slot_that_its_conversation_has_outgrown_is_given_up() -> None:
    slots, prompt = pool(slots=1, context=10), list(range(8))
    for need, cached, contexts in ((10, 0, [10]), (20, 8, [10, 20]), (30, 18, [10, 30])):
        lease = serve(slots, prompt, need=need)
        assert lease.cached == cached
        assert [view.context for view in slots.states({})] == contexts
        slots.release(lease, keep=True)
        prompt += range(100 + need, 110 + need)


def test_a_slot_that_holds_another_conversation_besides_is_kept() -> None:
    slots, shared = pool(slots=1, context=10), list(range(8))
    slots.release(serve(slots, shared, need=10), keep=True)
    slots.release(serve(slots, [*shared, 31, 32], need=20), keep=True)
    slots.release(serve(slots, [*shared, 41, 42], need=30), keep=True)
    assert [view.context for view in slots.states({})] == [10, 20, 30]
    assert serve(slots, [*shared, 31, 32, 33], need=20).cached == 10
