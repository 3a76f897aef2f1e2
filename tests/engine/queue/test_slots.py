"""The pool of slots: what is reused is what was encoded, and no other slot is touched."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.id_slots import (
    CONFIG,
    encode,
    expected,
    key,
    pool,
    prefill,
    serve,
    stored,
)

from sfumato.engine.queue.slots import Media
from sfumato.model.cache import Slot, snapshot_bytes


def test_the_next_turn_pays_for_what_is_new() -> None:
    slots, prompt, answer = pool(), list(range(20)), [90, 91, 92]
    slots.release(serve(slots, prompt, reply=[50, 51, *answer]), keep=True)  # thoughts 50, 51
    lease = serve(slots, [*prompt, *answer, 7, 8])
    assert (lease.index, lease.cached, lease.allocated) == (0, 20, True)


def test_free_slots_forget_and_busy_ones_do_not() -> None:
    slots, prompt, other = pool(), list(range(20)), list(range(30, 50))
    slots.release(serve(slots, prompt), keep=True)
    busy = serve(slots, other)
    assert slots.snapshot_bytes
    assert [slots.forget(), slots.forget()] == [1, 0]
    assert stored(busy.slot) == expected(other)
    encode(busy, [7])
    assert serve(slots, prompt).cached == 0
    slots.release(busy, keep=True)
    assert serve(slots, [*other, 7, 8]).cached == 21


def test_a_reply_that_stays_in_history_is_reused_to_its_end() -> None:
    slots, prompt = pool(), list(range(20))
    slots.release(serve(slots, prompt, reply=[50, 51]), keep=True)
    assert serve(slots, [*prompt, 50, 51, 7]).cached == 22


@pytest.mark.parametrize("other", [{"family": "other"}, {"adapter": 2}])
def test_two_keys_share_nothing(other: dict[str, Any]) -> None:
    """Neither free slots nor busy ones nor marks, though the tokens are the same."""
    slots, prompt = pool(slots=3), list(range(20))
    slots.release(serve(slots, prompt, adapter=1), keep=True)
    assert slots.reusable(key(prompt, adapter=1)) == 20
    for unlike in ({"adapter": 1} | other, {}):
        assert slots.reusable(key(prompt, **unlike)) == 0
        assert not key(prompt, **unlike).may_share(key(prompt, adapter=1))
        busy = serve(slots, prompt, reply=[50], **unlike)
        assert busy.slot.adapter == unlike.get("adapter", 0)
        assert busy.cached == 0 and busy.marks == (20,)
        slots.release(busy, keep=False)
    assert serve(slots, [*prompt, 60], adapter=1).cached == 20


def test_equal_ids_and_other_images_share_what_comes_before_the_image() -> None:
    """The ids behind images are placeholders, and equal for all of them."""
    prompt = [1, 2, 3, 4, *[9] * 4, 5, 6, *[9] * 4, 7]
    cat, dog = Media(4, 8, "cat"), Media(10, 14, "dog")
    shown = key(prompt, media=(cat, dog))
    for media, common in (
        ((cat, dog), 15),
        ((cat,), 10),
        ((cat, Media(10, 14, "cow")), 10),
        ((Media(4, 8, "dog"), dog), 4),
        ((Media(5, 8, "cat"), dog), 4),
        ((dog,), 4),
        ((), 4),
    ):
        other = key(prompt, media=media)
        assert shown.common(other) == other.common(shown) == common
        slots = pool(slots=3)
        slots.release(serve(slots, prompt[:14], media=(cat, dog), reply=[7]), keep=True)
        assert slots.reusable(other) == (common if common == 15 else 0)  # the windows have moved on
        lease = serve(slots, [*prompt, 8], media=media)
        assert lease.cached == (15 if common == 15 else 0)
        encode(lease, [8, 8])
        slots.release(lease, keep=True)
        assert serve(slots, [*prompt, 8, 8, 8, 1], media=media).cached == 18
    assert shown.common(key(prompt[:12], media=(cat, dog))) == 10, "no image is divided"
    assert shown.common(key([*prompt[:13], 8], media=(cat, dog))) == 10
    assert shown.common(key(prompt, "other", media=(cat, dog))) == 0
    assert shown.common(key(prompt, adapter=1, media=(cat, dog))) == 0


def test_an_image_that_is_cut_away_counts_no_more() -> None:
    slots, prompt = pool(slots=1), [1, 2, 9, 9]
    slots.release(serve(slots, prompt, media=(Media(2, 4, "cat"),)), keep=True)
    lease = serve(slots, prompt, media=(Media(2, 4, "dog"),))
    assert lease.cached == 2
    assert slots.reusable(key(prompt, media=(Media(2, 4, "cat"),))) == 2
    assert slots.reusable(key(prompt, media=(Media(2, 4, "dog"),))) == 4


def test_a_short_prefix_can_be_cut_anywhere() -> None:
    slots = pool()
    slots.release(serve(slots, [1, 2, 3, 4]), keep=True)
    assert serve(slots, [1, 2, 9, 9]).cached == 2


def test_a_busy_slot_is_copied_and_not_touched() -> None:
    slots, prompt = pool(), list(range(20))
    first = serve(slots, prompt, reply=[50, 51])
    second = serve(slots, [*prompt, 60])
    assert (second.index, second.cached) == (1, 20)
    assert stored(first.slot) == expected([*prompt, 50, 51])
    slots.release(first, keep=True)
    slots.release(second, keep=True)
    assert serve(slots, [*prompt, 60, 61]).index == 1  # the longer prefix, with the marks it needs


def test_a_shared_prompt_is_marked_when_it_shows() -> None:
    """The second conversation finds no mark where the two part, and leaves one for the third."""
    slots, shared = pool(slots=3), list(range(20))
    leases = [serve(slots, [*shared, *own]) for own in ([31, 32, 33], [41, 42], [51])]
    assert [lease.cached for lease in leases] == [0, 0, 20]
    assert leases[1].marks == (20, 22)


def test_another_conversation_does_not_cost_the_first_its_prompt() -> None:
    slots, shared = pool(), list(range(20))
    lease = slots.lease(key([*shared, 31]), 40, marks=(20, 21))
    assert lease
    prefill(slots, lease, [*shared, 31])
    slots.release(lease, keep=True)
    other = serve(slots, [*shared, 41])  # copies the shared prompt into the other, empty slot
    assert (other.index, other.cached) == (1, 20)
    slots.release(other, keep=True)
    assert serve(slots, [*shared, 31, 32]).cached == 21
    assert serve(slots, [*shared, 41, 42]).cached == 21


def test_the_least_recently_used_slot_is_given_up() -> None:
    slots = pool(slots=3)
    for first in (1, 2, 3):
        slots.release(serve(slots, [first] * 10), keep=True)
    slots.release(serve(slots, [1] * 10), keep=True)
    assert serve(slots, [7] * 10).index == 1


def test_what_may_be_half_written_is_not_reused() -> None:
    slots = pool()
    slots.release(serve(slots, [1] * 10), keep=False)
    assert serve(slots, [1] * 10).cached == 0
    lease = serve(slots, [2] * 10)
    lease.slot.reset()  # as a failed encode leaves it
    slots.release(lease, keep=True)
    assert serve(slots, [2] * 10).cached == 0


def test_a_take_over_that_failed_leaves_an_empty_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, first, second = pool(), [1] * 20, [2] * 20
    serve(slots, first)
    slots.release(serve(slots, second), keep=True)
    layers = Slot._of

    def fault(slot: Slot, sliding: bool) -> Any:
        if sliding:
            raise RuntimeError("a fault in a copy")
        return layers(slot, sliding)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "_of", fault)
        patch.setattr(Slot, "_ring", lambda slot: 4)
        with pytest.raises(RuntimeError, match="a fault"):
            slots.lease(key([*first, 3]), 40)  # the full layers are overwritten by then
    assert Slot._of is layers
    lease = serve(slots, second)
    assert lease.cached == 0 and stored(lease.slot) == expected(second)


def test_a_busy_slot_whose_encode_failed_is_no_source() -> None:
    slots = pool()
    serve(slots, [1] * 10).slot.reset()
    assert serve(slots, [1] * 10).cached == 0


def test_a_full_pool_lets_wait() -> None:
    slots = pool()
    leases = [serve(slots, [n] * 10) for n in (1, 2)]
    assert slots.lease(key([3] * 10), 40) is None
    assert slots.lease(key([3] * 10), 50) is None
    slots.release(leases[0], keep=True)
    assert slots.lease(key([3] * 10), 40) is not None


def test_snapshots_stay_below_their_limit() -> None:
    """The one that was not used for the longest time goes first, from all slots that share it."""
    one = snapshot_bytes(CONFIG, 10, torch.float32)
    slots = pool(slots=3, snapshots=2 * one)
    leases = []
    for first in (1, 2):
        leases.append(serve(slots, [first] * 10, reply=[9] * 10))
    assert slots.snapshot_bytes == 2 * one
    leases.append(serve(slots, [1] * 10))  # uses the first mark again
    assert leases[2].cached == 10
    slots.release(leases[2], keep=False)
    slots.release(serve(slots, [3] * 10), keep=False)
    assert slots.snapshot_bytes <= 2 * one
    for lease in leases[:2]:
        slots.release(lease, keep=True)
    assert serve(slots, [2] * 10).cached == 0
    assert serve(slots, [1] * 10).cached == 10


def test_no_snapshots() -> None:
    slots = pool(snapshots=0)
    slots.release(serve(slots, [1] * 10, reply=[9] * 10), keep=True)
    assert slots.snapshot_bytes == 0
    assert serve(slots, [1] * 10).cached == 0


@pytest.mark.parametrize("alike", [0, 8000], ids=["apart", "alike"])
def test_leasing_is_quick(alike: int, note: Callable[[str], None]) -> None:
    """Bookkeeping, copies apart: 16 slots, each with 8,000 tokens that share their beginning or
    not. The prompt comes as rows keep it. The house promises 100 µs, which the note tells; the
    limit is ten times that, for a slow and busy machine."""
    slots = pool(slots=16, context=8192)
    prompts = []
    for own in range(16):
        prompts.append(array("i", [*range(alike), *[1000 + own] * (8000 - alike), own]))
        slots.release(serve(slots, prompts[-1], need=8192), keep=True)
    times = []
    for turn in range(160):
        prompt = prompts[turn % 16]
        start = time.perf_counter()
        lease = slots.lease(key(prompt), 8192)
        times.append(time.perf_counter() - start)
        assert lease and lease.cached == 8001
        slots.release(lease, keep=True)
    best, median = min(times), sorted(times)[80]
    note(
        f"leasing one of 16 slots for 8,001 tokens that it holds: {median * 1e6:.0f} µs (median), "
        f"{best * 1e6:.0f} µs (least)"
    )
    assert best < 1e-3


def test_without_memory_for_snapshots_no_prompt_is_cut_for_them() -> None:
    slots = pool(snapshots=0)
    lease = slots.lease(key(list(range(20))), 40, marks=(10, 20))
    assert lease and lease.marks == ()
