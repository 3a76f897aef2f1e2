"""Which canvas has which row of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.step.batch import StepBatch

Key = tuple[int, int]
"""Width of the canvases, and depth of their histories."""

SeatsState = tuple[int, int]
"""Changes whenever a row becomes another canvas's, and whenever a step is written."""


class Seats:
    """A batch, and the canvases in its rows.

    A canvas keeps its row until it is dropped, or until others need the room: then its state
    moves to a batch of its own.
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

    def take(self, canvases: Sequence[Canvas]) -> None:
        """Puts the canvases into the first rows, in this order."""
        if len(canvases) > self.batch.rows:
            self._grow(len(canvases))
        for row, canvas in enumerate(canvases):
            if self._at(row) is canvas:
                continue
            start = canvas.prepare()
            self.version += 1
            if canvas.place is not None and self._has(canvas):
                self._swap(row, canvas.place[1])
                continue
            self._vacate(row, canvases)
            if canvas.place is None:
                self.batch.begin(row, start)
            else:
                self.batch.copy_row(row, *canvas.place)
            self._seat(row, canvas)

    def _at(self, row: int) -> Canvas | None:
        """The canvas in a row, if the canvas still uses it."""
        reference = self._canvases[row]
        canvas = None if reference is None else reference()
        if canvas is None or canvas.place is None:
            return None
        batch, place = canvas.place
        return canvas if batch is self.batch and place == row else None

    def _has(self, canvas: Canvas) -> bool:
        return canvas.place is not None and canvas.place[0] is self.batch

    def _seat(self, row: int, canvas: Canvas | None) -> None:
        self._canvases[row] = None if canvas is None else weakref.ref(canvas)
        if canvas is not None:
            canvas.place = self.batch, row

    def _swap(self, one: int, other: int) -> None:
        first, second = self._at(one), self._at(other)
        self.batch.swap(one, other)
        self._seat(one, second)
        self._seat(other, first)

    def _vacate(self, row: int, staying: Sequence[Canvas]) -> None:
        """Makes room in a row: its canvas moves to a free one, or out of the batch."""
        canvas = self._at(row)
        if canvas is None:
            return
        free = next((i for i in range(self.batch.rows) if self._at(i) is None), None)
        if free is not None:
            self.batch.copy_row(free, self.batch, row)
            self._seat(free, canvas)
        else:
            if any(canvas is one for one in staying):  # another, for which there is no room, goes
                rows = range(self.batch.rows)
                staying_rows = {one.place[1] for one in staying if self._has(one) and one.place}
                self._swap(row, next(i for i in rows if i not in staying_rows))
            self._leave(row)
        self._canvases[row] = None

    def _leave(self, row: int) -> None:
        """A canvas takes its state out of the batch."""
        canvas = self._at(row)
        assert canvas is not None
        alone = self._allocate(1)
        alone.copy_row(0, self.batch, row)
        canvas.place = alone, 0

    def _grow(self, rows: int) -> None:
        larger = self._allocate(max(rows, 2 * self.batch.rows))
        canvases = [self._at(row) for row in range(self.batch.rows)]
        for row, canvas in enumerate(canvases):
            if canvas is not None:
                larger.copy_row(row, self.batch, row)
        self.batch = larger
        self._canvases = [None] * larger.rows
        for row, canvas in enumerate(canvases):
            self._seat(row, canvas)
        self.version += 1

    def _allocate(self, rows: int) -> StepBatch:
        width, history = self._key
        return StepBatch.allocate(rows, width, history, self._hidden, self._dtype, self._device)
