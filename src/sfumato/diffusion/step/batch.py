"""The state of all rows of a step: a few tensors of fixed shape and address.

A batch is for one canvas width and one depth of argmax history.  Its tensors are allocated once and
written in place, so that a step can be captured once and replayed.  Rows join and leave by index;
those that take part in a step stand first.  All state of a row but its soft embedding is one run of
bytes, so that rows begin and move by a number of operations that does not depend on how many rows
or what state there are.  Knows no network and no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sfumato.diffusion.canvas import Canvas, RowStart
from sfumato.diffusion.noise import seed_words
from sfumato.model.cache import Slot
from sfumato.model.to_device import to_device
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
    numbers = "canvas", "attempt", "max_steps", "bare_pins", "step", "unchanged", "commits"
    flags = "cold", "self_conditioning", "converged", "done"
    return [
        *((name, torch.int64, shape) for name, shape in integers.items()),
        *((name, torch.int64, ()) for name in numbers),
        *((name, torch.bool, ()) for name in flags),
        ("expected", torch.int32, (width,)),
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
    bare_pins: Tensor  # int64 [R]: 1 where pinned positions have no soft embedding
    step: Tensor  # int64 [R]: steps done
    unchanged: Tensor  # int64 [R]: steps in a row before which the argmax canvas was the same
    commits: Tensor  # int64 [R]: tokens that the next step commits; 0 for a row that is denoised
    cold: Tensor  # bool [R]
    self_conditioning: Tensor  # bool [R]
    converged: Tensor  # bool [R]: the stopping rule ended the canvas
    done: Tensor  # bool [R]: no step changes the row any more
    expected: Tensor  # int32 [R, W]: 1 where the last step's top tokens sufficed (see `Skip`)
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

    def begin(
        self, rows: Sequence[int], starts: Sequence[RowStart], tokens: Sequence[Tensor]
    ) -> None:
        """Makes rows new canvases. tokens: int64 [length] of each, on the host."""
        values = _first_record(starts, tokens, self.width, self.history.shape[1])
        at = self._index(rows)
        self.soft.index_fill_(0, at, 0)
        values = to_device(values, self.record.device)
        self.record[:, : values.shape[1]].index_copy_(0, at, values)

    def pin(self, rows: Sequence[int], pins: Sequence[Tensor]) -> None:
        """Pins other positions of rows: int64 [length] of each, on the host, -1 where the token is
        free. A position that is pinned no more keeps its token for the next step."""
        short = [F.pad(each, (0, self.width - len(each)), value=0) for each in pins]
        values = to_device(torch.stack(short), self.record.device)
        at = self._index(rows)
        tokens = torch.where(values >= 0, values, self.tokens.index_select(0, at))
        self.pinned.index_copy_(0, at, values)
        self.tokens.index_copy_(0, at, tokens)

    def note(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> None:
        """Notes of each row which slot its canvas follows, and the canvas's length."""
        numbers = torch.tensor([[slot.index for slot in slots], [c.length for c in canvases]])
        slot_numbers, lengths = to_device(numbers, self.slots.device)
        self.slots.copy_(slot_numbers)
        self.length.copy_(lengths)

    def copy_row(self, row: int, source: StepBatch, source_row: int) -> None:
        """Overwrites a row by one of a batch of the same width and depth."""
        self.record[row].copy_(source.record[source_row])
        self.soft[row].copy_(source.soft[source_row])

    def take_over(self, source: StepBatch) -> None:
        """Copies the rows of a smaller batch to the first ones."""
        self.record[: source.rows].copy_(source.record)
        self.soft[: source.rows].copy_(source.soft)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows[sources[i]] to rows[targets[i]], all at once: a row may be among both."""
        take, put = self._index(sources), self._index(targets)
        values = [tensor.index_select(0, take) for tensor in (self.record, self.soft)]
        for tensor, value in zip((self.record, self.soft), values, strict=True):
            tensor.index_copy_(0, put, value)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(rows), self.record.device)


def _first_record(
    starts: Sequence[RowStart], tokens: Sequence[Tensor], width: int, history: int
) -> Tensor:
    """uint8 [rows, bytes] on the host: the records of new canvases, in the order of `_record`."""
    steps = max(len(start.temperatures) for start in starts)
    numbers = [
        (
            *[-1] * (history * width),
            *seed_words(start.seed),
            *(start.canvas, start.attempt, len(start.temperatures), start.bare_pins),
            *(0, 0, start.commits),  # step, unchanged, commits
        )
        for start in starts
    ]
    # What is committed is done: no step changes it.
    flags = [(start.cold, start.self_conditioning, False, start.commits > 0) for start in starts]
    temperatures = [
        [*start.temperatures, *[1.0] * (steps - len(start.temperatures))] for start in starts
    ]
    parts = (
        _padded(tokens, width),
        # Positions that take no part are pinned to token 0: no embedding lacks it.
        _padded([start.pinned for start in starts], width),
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor(flags, dtype=torch.bool),
        torch.zeros(len(starts), width, dtype=torch.int32),
        torch.tensor(temperatures, dtype=torch.float32),
    )
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """int64 [rows, width]: zeros after each row's values."""
    together = pad_sequence(list(rows), batch_first=True)
    return F.pad(together, (0, width - together.shape[1]))
