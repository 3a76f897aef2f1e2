"""Leases, marks and releases of slots in any order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st
from tests.support.id_slots import (
    PLENTY,
    encode,
    expected,
    key,
    pool,
    prefill,
    stored,
)

from sfumato.engine.queue.slots import Lease, SlotPool


def longest(slots: SlotPool, prompt: Sequence[int]) -> int:
    """The longest prefix of a prompt that some slot can give, by looking through all of them."""
    most = 0
    for place in slots._places:
        if place.is_known:
            pairs = zip(place.held, prompt, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            most = max(most, place.usable(common))
    return most


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
                assert stored(lease.slot) == expected(prompt[: lease.cached])
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
            assert stored(lease.slot) == expected(ids)
        assert slots.snapshot_bytes <= slots._limit
        assert sum(view.busy for view in slots.states({})) == len(out)
