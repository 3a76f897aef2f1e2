"""Forwards of reads on a device that works by itself: as graphs, but those of long questions.

A read's path depends on the read alone, since products of another path round otherwise: what a
question gives must not depend on which others are read beside it.  Rows of one path, pool and width
share forwards of a bounded number of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from sfumato.diffusion.step.captured import Forward
from sfumato.diffusion.step.graphs import Room, StepGraphs
from sfumato.model.cache import KVPool
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.placement import serving_kernels
from sfumato.model.question_pool import QuestionPool
from sfumato.model.segments import Beside, RowPart, Scratch
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


class ReadRows:
    """Rows of reads, as a forward reads them; their questions have places in a pool."""

    room: Room = "reads"
    is_alive = True

    def __init__(
        self, network: Network, questions: QuestionPool, kind: ReadKind, shared: ReadRoom
    ) -> None:
        self.kind, self._questions = kind, questions
        self.rows, self.width = kind.rows, kind.width
        tokens = kind.rows * kind.width
        sizes = [tokens, 1, *[kind.rows] * 3]
        numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=network.device)
        self._ids, self._used, self._slots, self._starts, self._counts = numbers.split(sizes)
        self._numbers = numbers[tokens:]  # what the host writes
        self._soft, self.hidden = shared.soft[:tokens], shared.hidden[:tokens]

    def of(self, pool: KVPool) -> tuple[Tensor, Tensor, RowPart]:
        beside = Beside(self._questions, self._starts, self._counts, self._used)
        return self._ids, self._soft, RowPart(pool, self._slots, self.width, beside=beside)

    def write(self, ids: Tensor, scratches: Sequence[Scratch], soft: Tensor | None) -> None:
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


@dataclass(frozen=True)
class ReadGroup:
    """What rows have in common that may share a forward. A row has its own whatever the others
    are."""

    questions: QuestionPool | None  # where the question's keys stand; None: in parts, a long one's
    pool: KVPool | None  # of the slots; None where each row is attended by itself
    width: int | None

    @classmethod
    def of(cls, scratch: Scratch, width: int, questions: QuestionPool) -> ReadGroup:
        """questions: where an empty question is thought to stand."""
        if scratch.span is None and scratch.length:
            return cls(None, None, None)
        own = scratch.span.pool if scratch.span else questions
        return cls(own, scratch.slot.pool, width)


@dataclass(frozen=True)
class _Row:
    ids: Tensor  # int64 [width]
    scratch: Scratch
    wanted: Sequence[int]
    soft: Tensor | None  # [width, hidden]


class ReadForwards:
    """The forwards of one network."""

    def __init__(self, network: Network, graphs: StepGraphs, questions: QuestionPool) -> None:
        self._network, self._graphs, self._questions = network, graphs, questions
        self._room = ReadRoom(network, room_tokens(network.config.canvas_length))

    def place(self, scratch: Scratch, tokens: int) -> None:
        """Gives a question of so many tokens places, unless it is long: in the pool, or in one of
        its own where the pool has none left."""
        scratch.place(self._questions, tokens)
        is_short = 0 < tokens <= self._questions.longest
        if is_short and scratch.span is None and not scratch.length:
            scratch.place(self._questions.for_one(tokens), tokens)

    @torch.no_grad()
    def denoise_beside(
        self,
        canvases: Sequence[Tensor],
        scratches: Sequence[Scratch],
        wanted: Sequence[Sequence[int]],
        soft: Tensor | None = None,
    ) -> Tensor:
        """As `Network.denoise_beside`."""
        lengths = [len(canvas) for canvas in canvases]
        softs = [None] * len(lengths) if soft is None else soft.split(lengths)
        rows = [_Row(*each) for each in zip(canvases, scratches, wanted, softs, strict=True)]
        groups: dict[ReadGroup, list[int]] = {}
        for number, row in enumerate(rows):
            group = ReadGroup.of(row.scratch, len(row.ids), self._questions)
            groups.setdefault(group, []).append(number)
        hidden, order = [], []
        for group, members in groups.items():
            most = self._most_rows(group) or len(members)
            for first in range(0, len(members), most):
                part = members[first : first + most]
                hidden.append(self._forward(group, [rows[number] for number in part], most))
                order += part
        if len(hidden) == 1:
            return hidden[0]
        return torch.cat(hidden).index_select(0, self._places(order, wanted))

    def _places(self, order: Sequence[int], wanted: Sequence[Sequence[int]]) -> Tensor:
        """int64: where each row's wanted tokens stand, where the rows stand in that order."""
        starts = accumulate((len(wanted[number]) for number in order), initial=0)
        first = dict(zip(order, starts, strict=False))
        places = [first[row] + at for row in range(len(wanted)) for at in range(len(wanted[row]))]
        return to_device(torch.tensor(places), self._network.device)

    def _most_rows(self, group: ReadGroup) -> int | None:
        """How many rows share a forward; None: any number."""
        if group.pool is None or group.width is None:
            return None
        network = self._network
        kernels = serving_kernels(network.device, network.dtype, network.cache_dtype)
        return most_rows(self._room.tokens, group.width, len(group.pool), kernels)

    def _forward(self, group: ReadGroup, rows: Sequence[_Row], most: int) -> Tensor:
        """The hidden states of the wanted tokens of rows of a group, which no later call
        overwrites."""
        scratches = [row.scratch for row in rows]
        ids, wanted = [row.ids for row in rows], [row.wanted for row in rows]
        softs = [row.soft for row in rows if row.soft is not None]
        soft = torch.cat(softs) if softs else None
        if group.questions is None or group.pool is None or group.width is None:
            return self._network.denoise_beside(ids, scratches, wanted, soft)
        kind = ReadKind.of(len(rows), group.width, most)
        step, inputs = self._step(group.questions, group.pool, kind)
        inputs.write(to_device(torch.cat(ids), self._network.device), scratches, soft)
        if group.questions is self._questions:
            self._graphs.run(step)
        else:
            step.run()
        starts = range(0, len(rows) * group.width, group.width)
        pairs = zip(starts, wanted, strict=True)
        only = list(chain.from_iterable((first + at for at in own) for first, own in pairs))
        return inputs.hidden.index_select(0, to_device(torch.tensor(only), self._network.device))

    def _step(
        self, questions: QuestionPool, pool: KVPool, kind: ReadKind
    ) -> tuple[Forward, ReadRows]:
        """One that is kept, where the questions stand in the pool that is."""
        if questions is self._questions:
            for step in self._graphs.kept(Forward):
                inputs = step.inputs
                if isinstance(inputs, ReadRows) and inputs.kind == kind and step.is_in(pool):
                    return step, inputs
        inputs = ReadRows(self._network, questions, kind, self._room)
        step = Forward(self._network, pool, inputs)
        if questions is self._questions:
            self._graphs.add(step)
        return step, inputs


def room_tokens(canvas_length: int) -> int:
    """Tokens of a forward of reads at most."""
    return max(PREFILL_CHUNK, canvas_length)


def most_rows(tokens: int, width: int, slots: int, kernels: frozenset[str]) -> int:
    """Rows of a forward of so many tokens at most, whose slots are of a pool of `slots`; kernels:
    the operations that they serve. Torch gathers the slot of each row, and no step, whose memory is
    counted, has more of them than the pool has slots."""
    rows = max(1, tokens // width)
    return rows if "read_attention" in kernels else min(rows, slots)
