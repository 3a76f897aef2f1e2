"""Which canvas has which row of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from sfumato.diffusion.canvas import Canvas, draw_first
from sfumato.diffusion.step.batch import StepBatch


class Key(NamedTuple):
    """Which canvases stand in one batch."""

    width: int
    history: int  # depth of their histories


SeatsState = tuple[int, int]
"""Changes whenever a row becomes another canvas's, and whenever a step is written."""


class Seats:
    """A batch, and the canvases in its rows.

    A canvas keeps its row until it is dropped, or until its row is needed: the rows of a step are
    the first ones, so the last row moves to where one has left. A canvas that takes no part and for
    which there is no room moves to a batch of its own.
    """

    def __init__(
        self, key: Key, rows: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._key, self._hidden, self._dtype, self._device = key, hidden, dtype, device
        self.batch = self._allocate(rows)
        self._canvases: list[weakref.ref[Canvas] | None] = [None] * rows
        self.version = 0  # changes whenever a row becomes another canvas's
        self.steps = 0  # that have been written

    @property
    def state(self) -> SeatsState:
        return self.version, self.steps

    def take(self, groups: Sequence[Sequence[Canvas]]) -> list[Canvas]:
        """Puts the canvases into the first rows, those of a group side by side, and returns them in
        the order of their rows. A canvas that is in a row of its group stays there."""
        count = sum(map(len, groups))
        if count > self.batch.rows:
            self._grow(count)
        seated: list[Canvas] = []
        coming: dict[int, Canvas] = {}  # by row
        for group in groups:
            rows = range(len(seated), len(seated) + len(group))
            staying = {self._row(canvas): canvas for canvas in group if self._row(canvas) in rows}
            arriving = (canvas for canvas in group if self._row(canvas) not in rows)
            coming |= zip((row for row in rows if row not in staying), arriving, strict=True)
            seated += [staying.get(row) or coming[row] for row in rows]
        if coming:
            self._arrange(coming, count)
        self._pin(seated)
        return seated

    def _pin(self, seated: Sequence[Canvas]) -> None:
        """Gives rows the pins that a constraint asks of the step to come."""
        changed = [(row, canvas) for row, canvas in enumerate(seated) if canvas.has_new_pins]
        if not changed:
            return
        self.batch.pin([row for row, _ in changed], [canvas.pinned for _, canvas in changed])
        for _, canvas in changed:
            canvas.has_new_pins = False

    def _arrange(self, coming: Mapping[int, Canvas], count: int) -> None:
        """Puts each canvas into its row, which is among the first `count`: at most one copy of all
        that move, and one of all that begin."""
        self.version += 1
        starts = {row: canvas.prepare() for row, canvas in coming.items() if canvas.place is None}
        moves = {source: row for row, c in coming.items() if (source := self._row(c)) is not None}
        moves |= self._make_room(coming.keys() - moves.keys(), count, moves.keys())
        if moves:
            self.batch.move(list(moves), list(moves.values()))
            moved = [self._at(source) for source in moves]
            for source in moves:
                self._canvases[source] = None
            for canvas, row in zip(moved, moves.values(), strict=True):
                self._seat(row, canvas)
        for row, canvas in coming.items():
            if canvas.place is not None and self._row(canvas) is None:
                self.batch.copy_row(row, *canvas.place)
                self._seat(row, canvas)
        if starts:
            new = [coming[row] for row in starts]
            draw_first(new)
            self.batch.begin(list(starts), list(starts.values()), [c.begun for c in new])
            for row, canvas in zip(starts, new, strict=True):
                self._seat(row, canvas)

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

    def _seat(self, row: int, canvas: Canvas | None) -> None:
        self._canvases[row] = None if canvas is None else weakref.ref(canvas)
        if canvas is not None:
            canvas.place = self.batch, row

    def _leave(self, row: int, canvas: Canvas) -> None:
        """The canvas of a row takes its state out of the batch."""
        alone = self._allocate(1)
        alone.copy_row(0, self.batch, row)
        canvas.place = alone, 0
        self._canvases[row] = None

    def _grow(self, rows: int) -> None:
        larger = self._allocate(max(rows, 2 * self.batch.rows))
        larger.take_over(self.batch)
        canvases = [self._at(row) for row in range(self.batch.rows)]
        self.batch = larger
        self._canvases = [None] * larger.rows
        for row, canvas in enumerate(canvases):
            self._seat(row, canvas)
        self.version += 1

    def _allocate(self, rows: int) -> StepBatch:
        width, history = self._key.width, self._key.history
        return StepBatch.allocate(rows, width, history, self._hidden, self._dtype, self._device)
