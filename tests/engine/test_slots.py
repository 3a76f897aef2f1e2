"""The pool of slots: what is reused is what was encoded, and no other slot is touched.

Slots are real, with a window of 5; instead of a network, keys carry their token's id.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gguf_files import gguf_config

from sfumato.engine import TooLarge
from sfumato.engine.lease import CacheKey, Lease
from sfumato.engine.slots import SlotPool
from sfumato.model.cache import KVPool, Slot, slot_bytes, snapshot_bytes
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


def told(slot: Slot) -> list[dict[int, int]]:
    """By layer, the token at each position that it holds."""
    found = []
    for index in range(len(CONFIG.layers)):
        keys, values, positions = slot.read(index)
        assert torch.equal(keys, -values) and torch.equal(keys, keys[:1, :, :1].expand_as(keys))
        found.append(dict(zip(positions.tolist(), keys[0, :, 0].int().tolist(), strict=True)))
    return found


def expected(ids: Sequence[int]) -> list[dict[int, int]]:
    whole = dict(enumerate(ids))
    last = {p: token for p, token in whole.items() if p >= len(ids) - 4}
    return [last, last, whole]


def key(ids: Sequence[int], family: str = "tiny", adapter: str | None = None) -> CacheKey:
    return CacheKey(family, adapter, ids)


def serve(
    pool: SlotPool,
    ids: Sequence[int],
    reply: Sequence[int] = (),
    need: int = 40,
    **encoder: str,
) -> Lease:
    """Leases, encodes with its stops, marks the end as well, and appends a reply."""
    lease = pool.lease(key(ids, **encoder), need, marks=(len(ids),))
    assert lease is not None
    assert told(lease.slot) == expected(ids[: lease.cached])
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


def test_the_next_turn_pays_for_what_is_new() -> None:
    slots, prompt, answer = pool(), list(range(20)), [90, 91, 92]
    slots.release(serve(slots, prompt, reply=[50, 51, *answer]), keep=True)  # thoughts 50, 51
    assert (slots.encoded_tokens, slots.cached_tokens) == (25, 0)
    lease = serve(slots, [*prompt, *answer, 7, 8])
    assert (lease.index, lease.cached, lease.allocated) == (0, 20, True)
    assert (slots.encoded_tokens, slots.cached_tokens) == (30, 20)


def test_free_slots_forget_and_busy_ones_do_not() -> None:
    slots, prompt, other = pool(), list(range(20)), list(range(30, 50))
    slots.release(serve(slots, prompt), keep=True)
    busy = serve(slots, other)
    assert slots.snapshot_bytes
    assert [slots.forget(), slots.forget()] == [1, 0]
    assert told(busy.slot) == expected(other)
    encode(busy, [7])
    assert serve(slots, prompt).cached == 0
    slots.release(busy, keep=True)
    assert serve(slots, [*other, 7, 8]).cached == 21


def test_a_reply_that_stays_in_history_is_reused_to_its_end() -> None:
    slots, prompt = pool(), list(range(20))
    slots.release(serve(slots, prompt, reply=[50, 51]), keep=True)
    assert serve(slots, [*prompt, 50, 51, 7]).cached == 22


@pytest.mark.parametrize("other", [{"family": "other"}, {"adapter": "b"}])
def test_two_keys_share_nothing(other: dict[str, str]) -> None:
    """Neither free slots nor busy ones nor marks, though the tokens are the same."""
    slots, prompt = pool(slots=3), list(range(20))
    slots.release(serve(slots, prompt, adapter="a"), keep=True)
    assert slots.reusable(key(prompt, adapter="a")) == 20
    for unlike in ({"adapter": "a"} | other, {}):
        assert slots.reusable(key(prompt, **unlike)) == 0
        assert not key(prompt, **unlike).may_share(key(prompt, adapter="a"))
        busy = serve(slots, prompt, reply=[50], **unlike)
        assert busy.cached == 0 and busy.marks == (20,)
        slots.release(busy, keep=False)
    assert serve(slots, [*prompt, 60], adapter="a").cached == 20


def test_a_short_prefix_can_be_cut_anywhere() -> None:
    slots = pool()
    slots.release(serve(slots, [1, 2, 3, 4]), keep=True)
    assert serve(slots, [1, 2, 9, 9]).cached == 2


def test_a_busy_slot_is_copied_and_not_touched() -> None:
    slots, prompt = pool(), list(range(20))
    first = serve(slots, prompt, reply=[50, 51])
    second = serve(slots, [*prompt, 60])
    assert (second.index, second.cached) == (1, 20)
    assert told(first.slot) == expected([*prompt, 50, 51])
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
    rings = Slot._rings

    def fault(slot: Slot) -> Any:
        raise RuntimeError("a fault in a copy")

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "_rings", fault)
        patch.setattr(Slot, "_ring", lambda slot: 4)
        with pytest.raises(RuntimeError, match="a fault"):
            slots.lease(key([*first, 3]), 40)  # the full layers are overwritten by then
    assert Slot._rings is rings
    lease = serve(slots, second)
    assert lease.cached == 0 and told(lease.slot) == expected(second)


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


def test_strict_refuses_what_does_not_fit_a_slot() -> None:
    slots = pool(strict=True)
    assert slots.lease(key([1]), 40) is not None
    with pytest.raises(
        TooLarge, match=r"a context of 41 tokens and slots have 40; raise --context"
    ):
        slots.lease(key([1]), 41)
    assert [view.busy for view in slots.views()] == [True, False]


def test_a_larger_slot_is_made_and_kept_for_the_next_turn() -> None:
    slots = pool()
    prompt = list(range(60))
    slots.release(serve(slots, prompt[:20]), keep=True)
    lease = serve(slots, prompt, need=70)
    assert (lease.context, lease.cached, lease.allocated) == (80, 20, False)
    assert slots.views()[lease.index].larger and slots.larger_bytes == lease.slot.nbytes()
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
    assert first and first.context == 50
    assert slots.lease(key([2]), 50) is None  # two would not fit
    slots.release(first, keep=True)
    second = slots.lease(key([2]), 60)  # the idle one makes room
    assert second and second.context == 60
    assert slots.larger_bytes == large > small
    assert [view.context for view in slots.views()] == [40, 40, 40, 60]


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
    assert [view.context for view in slots.views()] == [40, 40, 40, 80, 50]
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


def longest(slots: SlotPool, prompt: Sequence[int]) -> int:
    """The longest prefix of a prompt that some slot can give, by looking through all of them."""
    found = 0
    for place in slots._places:
        if place.is_known:
            pairs = zip(place.held, prompt, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found = max(found, place.usable(common))
    return found


@given(data=st.data())
def test_any_course_of_events(data: st.DataObject) -> None:
    """What a lease finds in its slot is what its prompt says, whatever went before, and no slot has
    more of it to give; and leases that are out keep what they have."""
    count = data.draw(st.integers(1, 3))
    slots = pool(slots=count, context=24, snapshots=data.draw(st.sampled_from([0, 6000, PLENTY])))
    token = st.integers(0, 1)
    out: list[tuple[Lease, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["lease", "lease", "extend", "mark", "release"]))
        if event == "lease":
            history = data.draw(st.sampled_from([[], *(ids for _, ids in out)]))
            prompt = [*history, *data.draw(st.lists(token, max_size=16))][:30]
            stops = data.draw(st.sets(st.integers(1, 30)))
            most = longest(slots, prompt)
            lease = slots.lease(key(prompt), max(1, len(prompt)), marks=stops)
            assert (lease is None) == (len(out) == count)
            if lease:
                assert lease.cached == most
                assert told(lease.slot) == expected(prompt[: lease.cached])
                prefill(slots, lease, prompt)
                out.append((lease, prompt))
        elif out:
            lease, ids = data.draw(st.sampled_from(out))
            if event == "extend":
                more = data.draw(st.lists(token, max_size=lease.slot.room()))
                encode(lease, more)
                ids += more
            elif event == "mark":
                slots.mark(lease)
            else:
                slots.release(lease, keep=data.draw(st.booleans()))
                out = [pair for pair in out if pair[0] is not lease]
        for lease, ids in out:
            assert told(lease.slot) == expected(ids)
        assert slots.snapshot_bytes <= slots._limit
        assert sum(view.busy for view in slots.views()) == len(out)


def test_a_slot_that_its_conversation_has_outgrown_is_given_up() -> None:
    slots, prompt = pool(slots=1, context=10), list(range(8))
    for need, cached, contexts in ((10, 0, [10]), (20, 8, [10, 20]), (30, 18, [10, 30])):
        lease = serve(slots, prompt, need=need)
        assert lease.cached == cached
        assert [view.context for view in slots.views()] == contexts
        slots.release(lease, keep=True)
        prompt += range(100 + need, 110 + need)


def test_a_slot_that_holds_another_conversation_besides_is_kept() -> None:
    slots, shared = pool(slots=1, context=10), list(range(8))
    slots.release(serve(slots, shared, need=10), keep=True)
    slots.release(serve(slots, [*shared, 31, 32], need=20), keep=True)
    slots.release(serve(slots, [*shared, 41, 42], need=30), keep=True)
    assert [view.context for view in slots.views()] == [10, 20, 30]
    assert serve(slots, [*shared, 31, 32, 33], need=20).cached == 10


def test_without_memory_for_snapshots_no_prompt_is_cut_for_them() -> None:
    slots = pool(snapshots=0)
    lease = slots.lease(key(list(range(20))), 40, marks=(10, 20))
    assert lease and lease.marks == ()
