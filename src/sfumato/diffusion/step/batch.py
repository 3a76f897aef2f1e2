"""The state of all rows of a step, tensors of fixed shape and address; and whose rows they are.

A batch is for one canvas width and one depth of argmax history.  Its tensors are allocated once and
written in place, so that a step can be captured once and replayed.  Rows join and leave by index;
those that take part in a step stand first.  All state of a row but its soft embedding is one run of
bytes, so that rows begin and move by a number of operations that does not depend on how many rows
or what state there are.  Knows no rules and no forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sfumato.diffusion.canvas import Canvas, draw_first
from sfumato.diffusion.noise import Noise, seed_words
from sfumato.diffusion.sampler import EntropyBound, Never
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.cache import Slot
from sfumato.model.devices import to_device
from sfumato.model.network import Network
from sfumato.options.limits import MOST_STEPS

WIDTHS = (16, 32, 64, 128, 256)
"""Canvas widths that have a batch of their own, beside the checkpoint's."""


def width_for(length: int, longest: int) -> int:
    """The width of the batch in which a canvas of `length` positions runs; longest: the
    checkpoint's canvas length."""
    return min(width for width in (*WIDTHS, max(length, longest)) if width >= length)


def _record(width: int, history: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of what a row's record holds, in the order of its bytes: by falling
    size of an element, so that each is aligned. Temperatures are last: a row that begins writes no
    more of them than it has steps."""
    integers = {"tokens": (width,), "pinned": (width,), "history": (history, width), "seeds": (2,)}
    numbers = "canvas", "attempt", "max_steps", "hard_pins", "step", "unchanged", "commits"
    flags = "cold", "self_conditioning", "converged", "done"
    return [
        *((name, torch.int64, shape) for name, shape in integers.items()),
        *((name, torch.int64, ()) for name in numbers),
        *((name, torch.bool, ()) for name in flags),
        ("expected", torch.int32, (width,)),
        ("pace", torch.int32, (width,)),
        ("temperatures", torch.float32, (MOST_STEPS,)),
    ]


@dataclass(frozen=True)
class StepBatch:
    """Rows of one canvas width. R: rows, W: width, H: depth of the history."""

    record: Tensor  # uint8 [R, bytes]: of each row all that the tensors below hold
    tokens: Tensor  # int64 [R, W]: the canvases that the next step reads
    pinned: Tensor  # int64 [R, W]: the token of a pinned position, -1 elsewhere
    history: Tensor  # int64 [R, H, W]: argmax canvases, the newest last; -1: none yet
    seeds: Tensor  # int64 [R, 2]: 32-bit words, the low one first
    canvas: Tensor  # int64 [R]: 0, 1, … within the reply
    attempt: Tensor  # int64 [R]
    max_steps: Tensor  # int64 [R]
    hard_pins: Tensor  # int64 [R]: 1 where pinned positions have no soft embedding
    step: Tensor  # int64 [R]: steps done
    unchanged: Tensor  # int64 [R]: steps in a row before which the argmax canvas was the same
    commits: Tensor  # int64 [R]: tokens that the next step commits; 0 for a row that is denoised
    cold: Tensor  # bool [R]
    self_conditioning: Tensor  # bool [R]
    converged: Tensor  # bool [R]: the stopping rule ended the canvas
    done: Tensor  # bool [R]: no step changes the row any more
    expected: Tensor  # int32 [R, W]: 1 where the last step's top tokens sufficed (see `Skip`)
    pace: Tensor  # int32 [R, W]: mask tokens that each step reveals at least; 0: noise is random
    temperatures: Tensor  # float32 [R, MOST_STEPS]
    # Not in the record:
    soft: Tensor  # [R, W, hidden]: for the next step's self-conditioning; 0 before there is any
    slots: Tensor  # int64 [R]: the row's slot in its pool; written by each layout, as is `length`
    length: Tensor  # int64 [R]: positions that take part, the first ones

    @classmethod
    def allocate(
        cls,
        rows: int,
        width: int,
        history: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StepBatch:
        parts = _record(width, history)
        sizes = [prod(shape) * kind.itemsize for _, kind, shape in parts]
        # A multiple of the largest element, so that each row is aligned as the first one.
        record = torch.zeros(rows, -(-sum(sizes) // 8) * 8, dtype=torch.uint8, device=device)
        views = {
            name: columns.view(kind).view(rows, *shape)
            for (name, kind, shape), columns in zip(
                parts, record[:, : sum(sizes)].split(sizes, dim=1), strict=True
            )
        }
        return cls(
            record=record,
            **views,
            soft=torch.zeros(rows, width, hidden, dtype=dtype, device=device),
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            length=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the batch has for itself; most of its tensors are views of the record."""
        return sum(tensor.nbytes for tensor in (self.record, self.soft, self.slots, self.length))

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def first(self, count: int) -> StepBatch:
        """The first `count` rows: views."""
        return StepBatch(*(tensor[:count] for tensor in self.tensors()))

    def begin(self, rows: Sequence[int], canvases: Sequence[Canvas]) -> None:
        """Makes rows new canvases, which are prepared."""
        values = _first_record(canvases, self.width, self.history.shape[1])
        at = self._index(rows)
        self.soft.index_fill_(0, at, 0)
        values = to_device(values, self.record.device)
        self.record[:, : values.shape[1]].index_copy_(0, at, values)

    def pin(self, rows: Sequence[int], pins: Sequence[Tensor], mask: int | None = None) -> None:
        """Pins other positions of rows: int64 [length] of each, on the host, -1 where the token is
        free. A position that is pinned no more keeps its token for the next step; but where the
        noise is a token `mask`, all that is not pinned becomes it."""
        short = [F.pad(each, (0, self.width - len(each)), value=0) for each in pins]
        values = to_device(torch.stack(short), self.record.device)
        at = self._index(rows)
        before = self.tokens.index_select(0, at)
        free = before if mask is None else torch.full_like(before, mask)
        tokens = torch.where(values >= 0, values, free)
        self.pinned.index_copy_(0, at, values)
        self.tokens.index_copy_(0, at, tokens)

    def note(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> None:
        """Notes of each row which slot its canvas follows, and the canvas's length."""
        numbers = torch.tensor([[slot.index for slot in slots], [c.length for c in canvases]])
        slot_numbers, lengths = to_device(numbers, self.slots.device)
        self.slots.copy_(slot_numbers)
        self.length.copy_(lengths)

    def copy(self, rows: int | slice, source: StepBatch, source_rows: int | slice) -> None:
        """Overwrites rows by those of a batch of the same width and depth."""
        self.record[rows].copy_(source.record[source_rows])
        self.soft[rows].copy_(source.soft[source_rows])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows[sources[i]] to rows[targets[i]], all at once: a row may be among both."""
        take, put = self._index(sources), self._index(targets)
        values = [tensor.index_select(0, take) for tensor in (self.record, self.soft)]
        for tensor, value in zip((self.record, self.soft), values, strict=True):
            tensor.index_copy_(0, put, value)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(rows), self.record.device)


def _first_record(canvases: Sequence[Canvas], width: int, history: int) -> Tensor:
    """uint8 [rows, bytes] on the host: the records of new canvases, in the order of `_record`."""
    steps = max(len(canvas.temperatures) for canvas in canvases)
    numbers = [
        (
            *[-1] * (history * width),
            *seed_words(c.noise.seed),
            *(c.noise.canvas, c.noise.attempt, len(c.temperatures), c.hard_pins),
            *(0, 0, c.commits),  # step, unchanged, commits
        )
        for c in canvases
    ]
    # What is committed is done: no step changes it.
    flags = [
        (c.config.temperature == 0, c.config.self_conditioning, False, c.commits > 0)
        for c in canvases
    ]
    temperatures = [[*c.temperatures, *[1.0] * (steps - len(c.temperatures))] for c in canvases]
    parts = (
        _padded([canvas.begun for canvas in canvases], width),
        # Positions that take no part are pinned to token 0: no embedding lacks it.
        _padded([canvas.pinned for canvas in canvases], width),
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor(flags, dtype=torch.bool),
        torch.zeros(len(canvases), width, dtype=torch.int32),
        torch.tensor(
            [[*c.pace, *[c.mask_id is not None] * (width - len(c.pace))] for c in canvases],
            dtype=torch.int32,
        ),
        torch.tensor(temperatures, dtype=torch.float32),
    )
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """int64 [rows, width]: zeros after each row's values."""
    together = pad_sequence(list(rows), batch_first=True)
    return F.pad(together, (0, width - together.shape[1]))


class Commit(Canvas):
    """Tokens that follow a slot's prefix. Its row is done before the step, which commits it."""

    def __init__(self, ids: Sequence[int], config: SamplerConfig, network: Network) -> None:
        """config: of the canvas that the tokens settled in, as long as they are at least."""
        assert config.canvas_length and 0 < len(ids) <= config.canvas_length
        own = replace(config, canvas_length=len(ids))
        vocab_size, device = network.config.vocab_size, network.device
        super().__init__(own, Noise(0, 0), vocab_size, device, mask_id=network.config.mask_id)
        # Of the canvas that the tokens settled in, as is the depth of the history.
        self.step_width = width_for(config.canvas_length, network.config.canvas_length)
        # Rules and processors decide nothing in such a row.
        self.config = replace(
            own,
            sampler=EntropyBound(),
            stopping=Never(),
            processors=(),
            temperature=0.0,
            self_conditioning=False,
        )
        self._begun = self.pinned = torch.tensor(ids, dtype=torch.int64)
        self.commits, self.temperatures = self.length, [1.0]


class Key(NamedTuple):
    """Which canvases stand in one batch."""

    width: int
    history: int  # depth of their histories


RowsState = tuple[int, int]
"""Changes whenever a row becomes another canvas's, and whenever a step is written."""


class BatchRows:
    """A batch, and the canvases in its rows.

    A canvas keeps its row until it is dropped, or until its row is needed: the rows of a step are
    the first ones, so the last row moves to where one has left. A canvas that takes no part and for
    which there is no room moves to a batch of its own.
    """

    def __init__(self, allocate: Callable[[int], StepBatch], rows: int) -> None:
        """allocate: makes a batch of so many rows, of one width and depth."""
        self._allocate, self.batch = allocate, allocate(rows)
        self._canvases: list[weakref.ref[Canvas] | None] = [None] * rows
        self.version = 0  # changes whenever a row becomes another canvas's
        self.steps = 0  # that have been written

    @property
    def state(self) -> RowsState:
        return self.version, self.steps

    def take(self, groups: Sequence[Sequence[Canvas]]) -> list[Canvas]:
        """Puts the canvases into the first rows, those of a group side by side, and returns them in
        the order of their rows. A canvas that is in a row of its group stays there."""
        count = sum(map(len, groups))
        if count > self.batch.rows:
            self._grow(count)
        placed: list[Canvas] = []
        coming: dict[int, Canvas] = {}  # by row
        for group in groups:
            rows = range(len(placed), len(placed) + len(group))
            staying = {self._row(canvas): canvas for canvas in group if self._row(canvas) in rows}
            arriving = (canvas for canvas in group if self._row(canvas) not in rows)
            coming |= zip((row for row in rows if row not in staying), arriving, strict=True)
            placed += [staying.get(row) or coming[row] for row in rows]
        if coming:
            self._arrange(coming, count)
        self._pin(placed)
        return placed

    def _pin(self, placed: Sequence[Canvas]) -> None:
        """Gives rows the pins that a constraint asks of the step to come."""
        changed = [(row, canvas) for row, canvas in enumerate(placed) if canvas.has_new_pins]
        if not changed:
            return
        pins, mask = [canvas.pinned for _, canvas in changed], changed[0][1].mask_id
        self.batch.pin([row for row, _ in changed], pins, mask)
        for _, canvas in changed:
            canvas.has_new_pins = False

    def _arrange(self, coming: Mapping[int, Canvas], count: int) -> None:
        """Puts each canvas into its row, which is among the first `count`: at most one copy of all
        that move, and one of all that begin."""
        self.version += 1
        starts = {row: canvas for row, canvas in coming.items() if canvas.place is None}
        for new in starts.values():
            new.prepare()
        moves = {source: row for row, c in coming.items() if (source := self._row(c)) is not None}
        moves |= self._make_room(coming.keys() - moves.keys(), count, moves.keys())
        if moves:
            self.batch.move(list(moves), list(moves.values()))
            moved = [self._at(source) for source in moves]
            for source in moves:
                self._canvases[source] = None
            for canvas, row in zip(moved, moves.values(), strict=True):
                self._assign(row, canvas)
        for row, canvas in coming.items():
            if canvas.place is not None and self._row(canvas) is None:
                self.batch.copy(row, *canvas.place)
                self._assign(row, canvas)
        if starts:
            draw_first(list(starts.values()))
            self.batch.begin(list(starts), list(starts.values()))
            for row, canvas in starts.items():
                self._assign(row, canvas)

    def _make_room(
        self, wanted: Collection[int], count: int, leaving: Collection[int]
    ) -> dict[int, int]:
        """Where the canvases go that stand in rows that others need: by row, a row after the first
        `count`. Those for which there is none leave the batch. leaving: rows that become free."""
        rows = range(count, self.batch.rows)
        free = iter([row for row in rows if row in leaving or self._at(row) is None])
        moves = {}
        for row in wanted:
            canvas = self._at(row)
            if canvas is None:
                continue
            target = next(free, None)
            if target is None:
                self._leave(row, canvas)
            else:
                moves[row] = target
        return moves

    def _row(self, canvas: Canvas) -> int | None:
        """The row of a canvas in this batch; None where it has none."""
        place = canvas.place
        return place[1] if place is not None and place[0] is self.batch else None

    def _at(self, row: int) -> Canvas | None:
        """The canvas in a row, if the canvas still uses it."""
        reference = self._canvases[row]
        canvas = None if reference is None else reference()
        return canvas if canvas is not None and self._row(canvas) == row else None

    def _assign(self, row: int, canvas: Canvas | None) -> None:
        self._canvases[row] = None if canvas is None else weakref.ref(canvas)
        if canvas is not None:
            canvas.place = self.batch, row

    def _leave(self, row: int, canvas: Canvas) -> None:
        """The canvas of a row takes its state out of the batch."""
        alone = self._allocate(1)
        alone.copy(0, self.batch, row)
        canvas.place = alone, 0
        self._canvases[row] = None

    def _grow(self, rows: int) -> None:
        larger = self._allocate(max(rows, 2 * self.batch.rows))
        larger.copy(slice(self.batch.rows), self.batch, slice(None))
        canvases = [self._at(row) for row in range(self.batch.rows)]
        self.batch = larger
        self._canvases = [None] * larger.rows
        for row, canvas in enumerate(canvases):
            self._assign(row, canvas)
        self.version += 1
