"""The forward of some reads as a function without arguments, which a graph can hold.

The rows have one width, and their questions have places in a pool.  Reads and writes tensors of
fixed address alone; its shapes depend on its kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.model.cache import KVPool
from sfumato.model.network import Network
from sfumato.model.placed_reads import PlacedReadRows, ReadPart
from sfumato.model.question_pool import QuestionPool
from sfumato.model.read_rows import Scratch
from sfumato.model.to_device import to_device


@dataclass(frozen=True)
class ReadKind:
    """What the function depends on, beside its addresses."""

    rows: int
    width: int

    @classmethod
    def of(cls, rows: int, width: int, most: int) -> ReadKind:
        """The kind in which so many rows are read, of which there are `most` in a forward: the next
        power of two, so that a graph serves any number below it, too, and few kinds are all."""
        assert 0 < rows <= most
        return cls(min(most, 1 << (rows - 1).bit_length()), width)


class ReadRoom:
    """What all forwards of a network share: each overwrites what the one before has left."""

    def __init__(self, network: Network, tokens: int) -> None:
        """tokens: of one forward at most."""
        self.tokens = tokens
        size, kind = (tokens, network.config.hidden_size), network.dtype
        self.soft, self.hidden = (
            torch.zeros(size, dtype=kind, device=network.device) for _ in range(2)
        )


class ReadForward:
    """The forward of rows whose slots are of one pool."""

    def __init__(
        self,
        network: Network,
        pool: KVPool,
        questions: QuestionPool,
        kind: ReadKind,
        room: ReadRoom,
    ) -> None:
        self.network, self.kind = network, kind
        self.rows, self.width = kind.rows, kind.width
        self._pool, self._questions = weakref.ref(pool), questions
        tokens = kind.rows * kind.width
        sizes = [tokens, 1, *[kind.rows] * 3]
        numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=network.device)
        self._ids, self._used, self._slots, self._starts, self._counts = numbers.split(sizes)
        self._numbers = numbers[tokens:]  # what the host writes
        self._soft, self.hidden = room.soft[:tokens], room.hidden[:tokens]

    def serves(self, pool: KVPool, kind: ReadKind) -> bool:
        """Whether this is the forward of such rows. False where the pool is gone."""
        return self._pool() is pool and self.kind == kind

    @property
    def is_alive(self) -> bool:
        """Whether its pool still exists."""
        return self._pool() is not None

    def prepare_for_capture(self) -> Callable[[], None]:
        """See `DeviceStep`."""
        return self.run

    def prepare_for_replay(
        self, ids: Tensor, scratches: Sequence[Scratch], soft: Tensor | None
    ) -> None:
        """Writes what the first rows are: ids int64 and soft [tokens, hidden] (None: zeros) of
        their tokens. The rows after them see their own canvas alone, of the vocabulary's first
        token. One copy to the device, for which the host does not wait."""
        spans = [scratch.span for scratch in scratches]
        # A row that is not read names a slot and a place that there are.
        more = [0] * (self.rows - len(scratches))
        slots = [*(scratch.slot.index for scratch in scratches), *more]
        starts = [*(span.start if span else 0 for span in spans), *more]
        counts = [*(scratch.length for scratch in scratches), *more]
        numbers = torch.tensor([len(scratches), *slots, *starts, *counts])
        self._numbers.copy_(to_device(numbers, self._numbers.device))
        tokens = len(scratches) * self.width
        self._ids[:tokens].copy_(ids)
        self._ids[tokens:].zero_()
        # Other forwards have written into the same memory.
        self._soft[tokens if soft is not None else 0 :].zero_()
        if soft is not None:
            self._soft[:tokens].copy_(soft)

    @torch.no_grad()
    def run(self) -> None:
        """Leaves the hidden states of all tokens in `hidden`."""
        pool = self._pool()
        assert pool is not None
        places = self._slots, self._starts, self._counts
        part = ReadPart(pool, self._questions, *places, self._used, self.width)
        rows = PlacedReadRows(part)
        self.hidden.copy_(self.network.read_batch(self._ids, self._soft, rows))
