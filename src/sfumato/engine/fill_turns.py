"""The steps of fills: the canvases of all fills go through the network in one batch.

Replies are denoised before them in the same engine step, in a batch of their own, and wait as long
as the fills' batch takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.constraints.fill_score import likelihoods
from sfumato.diffusion.step import Denoiser
from sfumato.engine.fill_row import FillRow
from sfumato.model.network import Network
from sfumato.model.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

_Item = tuple[FillRow, Canvas]


@dataclass(frozen=True)
class FillResult:
    """What an engine step gave a fill."""

    row: FillRow
    steps: list[tuple[Canvas, Draft]]  # none where its canvases were scored
    error: Exception | None


class FillTurns:
    """Takes a step of every fill: a denoising step of its open canvases, or the scores of a round
    that has none left.

    A batch that raises is run again in halves, so that only those fills fail of which one canvas
    raises by itself. Where memory ran out, no larger batch is tried until no fill is left.
    """

    def __init__(self, network: Network, free: Callable[[Exception], None]) -> None:
        """free: gives back unused memory, after an error for want of it."""
        self._network, self._free = network, free
        self._denoiser: Denoiser | None = None  # made when it is needed
        self._limit: int | None = None  # canvases in a batch, after a memory shortage

    def run(self, rows: Sequence[FillRow]) -> list[FillResult]:
        """One result for each row."""
        if not rows:
            self._limit = None
        errors: dict[FillRow, Exception] = {}
        items: list[_Item] = []
        for row in rows:
            try:
                items += self._items(row)
            except Exception as error:
                if is_out_of_memory(error):
                    self._free(error)
                errors[row] = error
        steps: dict[FillRow, list[tuple[Canvas, Draft]]] = {row: [] for row in rows}
        size = self._limit or max(1, len(items))
        for at in range(0, len(items), size):
            for (row, canvas), result in self._step(items[at : at + size]):
                if isinstance(result, Exception):
                    errors.setdefault(row, result)
                else:
                    steps[row].append((canvas, result))
        return [FillResult(row, steps[row], errors.get(row)) for row in rows]

    def _items(self, row: FillRow) -> list[_Item]:
        """The canvases to step; where none is open, the round is scored instead."""
        progress = row.progress(self._network)
        if not (progress.open or progress.done):
            assert row.lease
            scores = likelihoods(self._network, row.lease.slot, progress.tasks())
            self._network.synchronize()
            progress.scored(scores)
            return []
        return [(row, canvas) for canvas in progress.open]

    def _step(self, items: Sequence[_Item]) -> list[tuple[_Item, Draft | Exception]]:
        """Each canvas's draft, or why there is none."""
        try:
            return list(zip(items, self._batch(items), strict=True))
        except Exception as error:
            half = len(items) // 2
            if is_out_of_memory(error):
                self._limit = max(1, half)
                self._free(error)
            elif half:
                log.exception("%d canvases failed together; they are run in halves", len(items))
            if not half:
                return [(items[0], error)]
        return [*self._step(items[:half]), *self._step(items[half:])]

    def _batch(self, items: Sequence[_Item]) -> list[Draft | Exception]:
        if self._denoiser is None:
            self._denoiser = Denoiser(self._network, len(items))
        slots = [row.lease.slot for row, _ in items if row.lease]
        result = self._denoiser.forward([canvas for _, canvas in items], slots)
        self._network.synchronize()  # up to here nothing has changed, and all may be run again
        return self._denoiser.advance(result)
