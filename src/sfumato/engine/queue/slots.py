"""The pool of cache slots: which are leased, what each holds, and which prefix can be reused.

Slots are allocated once and leased to one request after another. A new request takes over the
longest prefix that some slot, free or busy, holds of its prompt. Sliding layers keep a window
only, so that a prefix can be cut where their windows are still there: at the slot's present end,
anywhere while no ring has come round, and at marks, of which snapshots are kept on the device.
Pure bookkeeping but for the copies; used by the engine's thread alone. Knows no requests.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.guard import MemoryGuard
from sfumato.model.adapters import NONE
from sfumato.model.cache import Slot, Snapshot, snapshot_bytes
from sfumato.model.devices import is_out_of_memory
from sfumato.model.model_config import NO_BLOCKS, Blocks
from sfumato.model.network import Network
from sfumato.refused import TooLarge

Lacks = Callable[[Sequence[int], int | None], str | None]
"""Why larger slots of so many positions, all of them together, do not go beside what was allocated
at start; None where they do. The second argument: bytes that such slots hold now, if the question
is whether there is room at present; None if it is whether there ever can be."""


@dataclass(frozen=True)
class Media:
    """A picture, or what else stands behind placeholder ids: equal ids do not make it the same."""

    start: int  # the position of its first placeholder
    end: int  # the one after its last
    digest: str  # of all that its positions are encoded from


@dataclass(frozen=True)
class CacheKey:
    """All that decides what a cache holds, by position: two keys share a prefix only where family
    and adapter are the same, up to where ids or media differ."""

    family: str  # of networks
    adapter: int  # the number of the one that the positions were encoded with, 0: none
    ids: array[int]  # int32: token ids, by position
    media: tuple[Media, ...] = ()  # in the order of their positions; they may lie beyond the ids
    blocks: Blocks = NO_BLOCKS

    def may_share(self, other: CacheKey) -> bool:
        """Whether equal content gives equal caches."""
        mine, others = ((k.family, k.adapter, k.blocks) for k in (self, other))
        return mine == others

    def may_share_beyond(self, other: CacheKey, length: int) -> bool:
        """Whether more than `length` positions may be common, to see before all are compared."""
        within = length < min(len(self.ids), len(other.ids))
        return within and self.may_share(other) and self.ids[length] == other.ids[length]

    def common(self, other: CacheKey) -> int:
        """How many positions both begin with alike, where that ends within none of the media."""
        most = min(len(self.ids), len(other.ids), self._same_media(other))
        if not most or not self.may_share(other):
            return 0
        # The views end with this call: an array cannot grow while one is there.
        differ = np.frombuffer(self.ids, np.int32, most) != np.frombuffer(other.ids, np.int32, most)
        first = int(differ.argmax())
        return self.undivided(first if differ[first] else most)

    def undivided(self, length: int) -> int:
        """The longest prefix of `length` positions at most that divides none of the media and no
        block."""
        length = self.blocks.border(length)
        return next((item.start for item in self.media if item.start < length < item.end), length)

    def _same_media(self, other: CacheKey) -> int:
        """The position of the first item that is not the same in both."""
        for mine, others in zip_longest(self.media, other.media):
            if mine != others:
                return min(item.start for item in (mine, others) if item is not None)
        return sys.maxsize


@dataclass(frozen=True)
class SlotState:
    """A slot as others see it."""

    index: int
    context: int  # positions
    busy: bool
    tokens: int  # positions filled
    larger: bool  # made for one long request, beyond the slots that were allocated at start
    request: str | None  # whose it is


@dataclass(eq=False)
class Mark:
    """A length at which a prompt ended, or that prompts share; shared by slots with that prefix."""

    snapshot: Snapshot
    used: int  # the pool's clock, when it last was


@dataclass(eq=False)
class Place:
    """One slot of the pool, and what is known of its contents."""

    index: int
    slot: Slot
    larger: bool
    # Of what it holds; its ids are the slot's own, and of its media only those within them count.
    key: CacheKey = field(default_factory=lambda: CacheKey("", NONE, array("i")))
    marks: dict[int, Mark] = field(default_factory=dict)  # by length
    busy: bool = False
    used: int = 0  # the pool's clock, when it was leased or released

    @property
    def held(self) -> array[int]:
        """Token ids, by position."""
        return self.key.ids

    @property
    def is_known(self) -> bool:
        """Whether `held` is what the slot holds: an encode may have failed, or is not noted yet."""
        return self.slot.length == len(self.held)

    def usable(self, common: int) -> int:
        """The longest prefix of the first `common` tokens whose windows are at hand."""
        if common and self.slot.holds(common):
            return common
        return max((n for n in self.marks if n <= common), default=0)

    def marked_beyond(self, length: int) -> bool:
        """Whether prompts that go beyond `length` can begin here."""
        return any(n > length for n in self.marks)

    def hold(self, key: CacheKey, length: int) -> None:
        """Notes that the slot holds the first `length` positions of a key; later ones will be
        appended to them."""
        self.key = replace(key, ids=key.ids[:length])

    def keep(self, length: int) -> None:
        """Forgets what is known of the tokens from `length` on."""
        del self.held[length:]
        self.marks = {n: mark for n, mark in self.marks.items() if n <= length}


class SlotPool:
    """All slots of an engine."""

    def __init__(
        self,
        network: Network,
        slots: int,
        context: int,
        strict: bool,
        snapshot_bytes: int,
        lacks: Lacks,
    ) -> None:
        self._network, self._context, self._strict = network, context, strict
        self._limit, self._lacks = snapshot_bytes, lacks
        self._rows, self._clock = slots, 0
        standard = enumerate(network.new_slots(slots, context))
        self._places = [Place(index, slot, larger=False) for index, slot in standard]

    def lease(self, key: CacheKey, need: int, marks: Iterable[int] = ()) -> Lease | None:
        """A slot of at least `need` positions whose prefix is the longest known one of the prompt
        `key`; None where the request has to wait for one. Raises TooLarge for what never fits.

        marks: prompt lengths that later prompts are likely to share (see `SnapshotPoints`). To
        them comes the length that this prompt shares with a slot which could not give all of it.
        """
        self.check(need)
        busy = sum(place.busy for place in self._places)
        if busy >= self._rows:
            return None
        fresh = None
        if need > self._context and not any(
            p.slot.capacity >= need and not p.busy for p in self._places
        ):
            fresh = self._made(need)
            if fresh is None and busy:
                return None
            if fresh is None:  # and waiting would change nothing
                raise self._too_large(need, self._lacks([need], self.larger_bytes))
        source, length, known = self._source(key)
        place = fresh or self._target(need, source, length)
        if source:
            self._take_over(place, source, length)
            if fresh and source.larger and not (source.busy or source.marked_beyond(length)):
                self._places.remove(source)  # outgrown
        else:
            place.slot.reset()
            place.slot.offset, place.slot.adapter = key.blocks.offset, key.adapter
            place.keep(0)
        place.busy, place.used = True, self._tick()
        place.hold(key, length)
        wanted = {*marks, known} if self.keeps_marks else set()
        stops = tuple(sorted({n for n in map(key.undivided, wanted) if length < n <= len(key.ids)}))
        return Lease(length, fresh is None, stops, place, self)

    @property
    def keeps_marks(self) -> bool:
        """Whether there is memory for snapshots."""
        return bool(self._limit)

    def reusable(self, key: CacheKey) -> int:
        """How many tokens of a prompt a lease would find in some slot now."""
        return self._source(key)[1]

    def check(self, need: int) -> None:
        """Raises TooLarge where no slot can ever hold `need` positions."""
        if need <= self._context:
            return
        lack = None if self._strict else self._lacks([need], None)
        if self._strict or lack is not None:
            raise self._too_large(need, lack)

    @property
    def longest(self) -> int:
        """Positions that the slot of a request can have at most, larger ones considered."""
        most = self._network.config.context_length
        if self._strict or most <= self._context:
            return min(self._context, most)
        beyond = range(self._context + 1, most + 1)
        at = bisect_left(beyond, True, key=lambda n: self._lacks([n], None) is not None)
        return self._context + at

    def mark(self, lease: Lease) -> None:
        """Keeps what it takes to come back to the slot's present length later."""
        place, length = lease.place, lease.slot.length
        if not length or length != len(place.held):
            return
        mark = place.marks.get(length)
        if mark is None:
            network = self._network
            self._evict(room=snapshot_bytes(network.config, length, network.cache_dtype))
            mark = place.marks[length] = Mark(place.slot.snapshot(), 0)
        mark.used = self._tick()
        self._evict()

    def release(self, lease: Lease, keep: bool) -> None:
        """Takes a slot back. keep: its contents serve later prompts; False where an encode may
        have left them half written."""
        place = lease.place
        assert place.busy, "a lease is released once"
        place.busy, place.used = False, self._tick()
        if not keep or place.slot.length != len(place.held):
            place.slot.reset()
            place.keep(0)

    def forget(self, adapter: int | None = None) -> int:
        """Empties the slots that are free, so that no prompt begins with what they hold; how many
        held something. Those that are busy keep what they have. adapter: the number of the one
        whose prefixes are meant; None: all are."""
        emptied = 0
        for place in self._places:
            if not place.busy and adapter in (None, place.key.adapter):
                emptied += bool(place.held)
                place.slot.reset()
                place.keep(0)
        return emptied

    @property
    def empty_slots(self) -> list[Slot]:
        """Empty slots of the first size; they must be empty again before the next lease."""
        return [p.slot for p in self._places if not (p.busy or p.held or p.larger)]

    @property
    def snapshot_bytes(self) -> int:
        """Memory of the device that snapshots take now."""
        return sum(mark.snapshot.nbytes for mark in self._marks())

    @property
    def larger_bytes(self) -> int:
        """Memory of the slots beyond those allocated at start."""
        return sum(place.slot.nbytes() for place in self._places if place.larger)

    def states(self, requests: Mapping[int, str]) -> tuple[SlotState, ...]:
        """requests: slot → the id of the request that has it."""
        return tuple(
            SlotState(
                p.index, p.slot.capacity, p.busy, len(p.held), p.larger, requests.get(p.index)
            )
            for p in self._places
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _too_large(self, need: int, lack: str | None) -> TooLarge:
        """lack: why there is no larger slot; None where one finds no room, or none may be made."""
        if self._strict:
            slots = f" and slots have {self._context:,}"
            advice = "raise --context, ask for fewer tokens, or allow larger slots (strict is set)"
        else:
            slots = f", slots have {self._context:,}; a larger one {lack or 'finds no room'}"
            advice = "lower --slots, --context or --snapshot-memory, or ask for fewer tokens"
        return TooLarge(
            None,
            "the request exceeds the available context size: it needs a context of "
            f"{need:,} tokens{slots}",
            advice,
            context=self._context,
        )

    def _source(self, key: CacheKey) -> tuple[Place | None, int, int]:
        """The place with the longest usable prefix of a prompt, if any, that prefix's length,
        and the longest common prefix, usable or not."""
        source, length, known = None, 0, 0
        # Of equals the first counts: a free one, and the last used.
        for place in sorted(self._places, key=lambda p: (p.busy, -p.used)):
            if length == len(key.ids):
                break
            if not place.is_known or not place.key.may_share(key):
                continue
            # No more than `known` tokens are common where the next one differs. All are compared
            # only if that many would do: a lease must not take 16 comparisons of 8,000 tokens.
            more = place.key.may_share_beyond(key, known)
            if not more and place.usable(min(known, len(place.held))) <= length:
                continue
            common = place.key.common(key)
            known = max(known, common)
            if (usable := place.usable(common)) > length:
                source, length = place, usable
        return source, length, known

    def _made(self, need: int) -> Place | None:
        """A new slot of `need` positions, or some more for the next turn; None where it has to
        wait for the memory of other larger ones."""
        busy = [p.slot.capacity for p in self._places if p.larger and p.busy]
        idle = sorted((p for p in self._places if p.larger and not p.busy), key=lambda p: p.used)
        roomy = min(-(-need // self._context) * self._context, self._network.config.context_length)
        held = self.larger_bytes
        for dropped in range(len(idle) + 1):  # idle slots, the least recently used first
            kept = [place.slot.capacity for place in idle[dropped:]]
            for capacity in (max(roomy, need), need):
                if self._lacks([capacity, *busy, *kept], held) is None:
                    self._places = [p for p in self._places if p not in idle[:dropped]]
                    return self._added(capacity)
        return None

    def _added(self, capacity: int) -> Place | None:
        try:
            slot = self._network.new_slot(capacity)
        except (RuntimeError, MemoryError):  # torch's error depends on the device
            return None
        numbers = {place.index for place in self._places}
        index = next(i for i in range(len(numbers) + 1) if i not in numbers)
        place = Place(index, slot, larger=True)
        self._places.append(place)
        return place

    def _target(self, need: int, source: Place | None, length: int) -> Place:
        """The free slot that is given up for a request: the source itself, or, where that holds a
        marked prompt beyond what is taken over, an empty one, or the least recently used."""
        free = [p for p in self._places if not p.busy and p.slot.capacity >= need]
        oldest = min(free, key=lambda p: (p.larger, bool(p.held), p.used))
        if source is None or source not in free:
            return oldest
        return oldest if source.marked_beyond(length) else source

    def _take_over(self, place: Place, source: Place, length: int) -> None:
        mark = source.marks.get(length)
        snapshot = None if source.slot.holds(length) or mark is None else mark.snapshot
        place.slot.restore(source.slot, length, snapshot)
        if mark is not None:
            mark.used = self._tick()
        if place is not source:
            place.marks = dict(source.marks)
        place.keep(length)

    def _marks(self) -> set[Mark]:
        return {mark for place in self._places for mark in place.marks.values()}

    def _evict(self, room: int = 0) -> None:
        """Drops the snapshots that were not used for the longest time, until so many bytes more are
        within the limit."""
        marks = sorted(self._marks(), key=lambda mark: mark.used)
        excess = sum(mark.snapshot.nbytes for mark in marks) + room - self._limit
        dropped = set()
        for mark in marks:
            if excess <= 0:
                break
            dropped.add(mark)
            excess -= mark.snapshot.nbytes
        if dropped:
            for place in self._places:
                place.marks = {n: mark for n, mark in place.marks.items() if mark not in dropped}


@dataclass
class Lease:
    """The use of a slot by one request, from `SlotPool.lease` to `SlotPool.release`."""

    cached: int  # tokens of the prompt that the slot held already, its prefix now
    allocated: bool  # at start or earlier, rather than one made for this request
    marks: tuple[int, ...]  # lengths over `cached` at which the prefill stops, to call `mark`
    place: Place
    pool: SlotPool

    @property
    def slot(self) -> Slot:
        return self.place.slot

    @property
    def index(self) -> int:
        return self.place.index

    def stop_at(self, length: int) -> None:
        """Has the prefill stop at one more length, to call `mark`, where that can still help."""
        if self.pool.keeps_marks and length > self.slot.length:
            self.marks = tuple(sorted({*self.marks, length}))

    def extend(self, ids: Iterable[int]) -> None:
        """Says which tokens an encode has just appended to the slot."""
        self.place.held.extend(ids)


def make_pool(network: Network, config: EngineConfig, guard: MemoryGuard) -> SlotPool:
    """The slots of an engine. Raises EngineError where the memory does not hold them."""
    c = config
    try:
        snapshots = guard.view.prediction.snapshots
        return SlotPool(network, c.slots, c.context, c.strict, snapshots, guard.lacks)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            None,
            f"the memory does not hold {c.slots} slots of {c.context:,} tokens "
            f"({guard.view.prediction.slots:,} bytes)",
            "lower --slots or --context",
        ) from error
