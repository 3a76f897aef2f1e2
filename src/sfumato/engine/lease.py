"""One slot of the pool: which prefix it holds, and the lease by which a request uses it.

Knows no requests; used by the engine's thread alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sfumato.model.cache import Slot, Snapshot

if TYPE_CHECKING:
    from sfumato.engine.slots import SlotPool


@dataclass(frozen=True)
class CacheKey:
    """All that decides what a cache holds after some positions: two keys share a prefix only where
    family and adapter are the same."""

    family: str  # of networks
    adapter: str | None  # that the positions were encoded with
    content: Sequence[int]  # by position: token ids

    def may_share(self, other: CacheKey) -> bool:
        """Whether equal content gives equal caches."""
        return (self.family, self.adapter) == (other.family, other.adapter)


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
    held: array[int] = field(default_factory=lambda: array("i"))  # token ids, by position
    encoder: tuple[str, str | None] | None = None  # family and adapter that `held` is encoded with
    marks: dict[int, Mark] = field(default_factory=dict)  # by length
    busy: bool = False
    used: int = 0  # the pool's clock, when it was leased or released

    @property
    def is_known(self) -> bool:
        """Whether `held` is what the slot holds: an encode may have failed, or is not noted yet."""
        return self.slot.length == len(self.held)

    def common(self, ids: np.ndarray) -> int:
        """How many of the first ids this slot holds."""
        if not self.is_known:
            return 0
        most = min(len(ids), len(self.held))
        if not most:
            return 0
        differ = np.frombuffer(self.held, np.int32, most) != ids[:most]
        first = int(differ.argmax())
        return first if differ[first] else most

    def usable(self, common: int) -> int:
        """The longest prefix of the first `common` tokens whose windows are at hand."""
        if common and self.slot.holds(common):
            return common
        return max((n for n in self.marks if n <= common), default=0)

    def marked_beyond(self, length: int) -> bool:
        """Whether prompts that go beyond `length` can begin here."""
        return any(n > length for n in self.marks)

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
        """Keeps what it takes to come back to the slot's present length later."""
        self.pool.mark(self)

    def extend(self, ids: Iterable[int]) -> None:
        """Says which tokens an encode has just appended to the slot."""
        before = len(self.place.held)
        self.place.held.extend(ids)
        self.pool.encoded_tokens += len(self.place.held) - before
