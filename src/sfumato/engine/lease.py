"""One slot of the pool: which prefix it holds, and the lease by which a request uses it.

Knows no requests; used by the engine's thread alone.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from sfumato.model.cache import Slot, Snapshot

if TYPE_CHECKING:
    from sfumato.engine.slots import SlotPool


@dataclass(frozen=True)
class Media:
    """An image, or what else stands behind placeholder ids: equal ids do not make it the same."""

    position: int  # of its first placeholder
    digest: str  # of all that its positions are encoded from


@dataclass(frozen=True)
class CacheKey:
    """All that decides what a cache holds, by position: two keys share a prefix only where family
    and adapter are the same, up to where ids or media differ."""

    family: str  # of networks
    adapter: str | None  # that the positions were encoded with
    ids: array[int]  # int32: token ids, by position
    media: tuple[Media, ...] = ()  # in the order of their positions; they may lie beyond the ids

    def may_share(self, other: CacheKey) -> bool:
        """Whether equal content gives equal caches."""
        return (self.family, self.adapter) == (other.family, other.adapter)

    def may_share_beyond(self, other: CacheKey, length: int) -> bool:
        """Whether more than `length` positions may be common, to see before all are compared."""
        within = length < min(len(self.ids), len(other.ids))
        return within and self.may_share(other) and self.ids[length] == other.ids[length]

    def common(self, other: CacheKey) -> int:
        """How many positions both begin with alike."""
        most = min(len(self.ids), len(other.ids), self._same_media(other))
        if not most or not self.may_share(other):
            return 0
        # The views end with this call: an array cannot grow while one is there.
        differ = np.frombuffer(self.ids, np.int32, most) != np.frombuffer(other.ids, np.int32, most)
        first = int(differ.argmax())
        return first if differ[first] else most

    def _same_media(self, other: CacheKey) -> int:
        """The position of the first item that is not the same in both."""
        for mine, others in zip_longest(self.media, other.media):
            if mine != others:
                return min(item.position for item in (mine, others) if item is not None)
        return sys.maxsize


@dataclass(frozen=True)
class SlotView:
    """A slot as others see it."""

    index: int
    context: int  # positions
    busy: bool
    tokens: int  # positions filled
    larger: bool  # made for one long request, beyond the slots that were allocated at start


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
    key: CacheKey = field(default_factory=lambda: CacheKey("", None, array("i")))
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

    @property
    def context(self) -> int:
        """Positions that the slot has."""
        return self.place.slot.capacity

    def stop_at(self, length: int) -> None:
        """Has the prefill stop at one more length, to call `mark`, where that can still help."""
        if self.pool.keeps_marks and length > self.slot.length:
            self.marks = tuple(sorted({*self.marks, length}))

    def mark(self) -> None:
        """Saves the state with which the slot can be cut back to its present length later."""
        self.pool.mark(self)

    def extend(self, ids: Iterable[int]) -> None:
        """Says which tokens an encode has just appended to the slot."""
        before = len(self.place.held)
        self.place.held.extend(ids)
        self.pool.encoded_tokens += len(self.place.held) - before
