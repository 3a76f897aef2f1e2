"""Runs a plan on the network, and keeps what fails in one row from the others.

A batch that raises is run again row by row, so that only those rows fail that raise alone.  Where
memory runs out, it is freed and half of the rows are tried; if that fails too, the newest row ends.
Decides nothing else, and knows no queue.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch

from sfumato.diffusion.step import forward
from sfumato.engine.failures import is_out_of_memory
from sfumato.engine.row import Row
from sfumato.engine.scheduler import Piece, Plan
from sfumato.engine.slots import SlotPool
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Tokens that one forward appends to a row's slot."""

    row: Row
    ids: list[int]


Encoded = tuple[Segment, Exception | None]
Found = tuple[Row, HeadStats | Exception]


@dataclass(frozen=True)
class Ran:
    """What became of a plan."""

    encoded: list[Encoded]
    encode_s: float
    found: list[Found]
    began: float  # when the denoising began, by the clock


class Runner:
    """Encodes and denoises batches of rows."""

    def __init__(self, network: Network, pool: SlotPool, clock: Callable[[], float]) -> None:
        self._network, self._pool, self._clock = network, pool, clock
        self._most: int | None = None  # rows that fit the memory, once more did not

    def run(self, plan: Plan, wanted: Callable[[Row], bool]) -> Ran:
        """Encodes the plan's pieces, then denoises those of its rows that did not fail meanwhile
        and are still wanted."""
        began = self._clock()
        encoded = self.encode(plan.encode)
        denoise = self._clock()
        failed = {segment.row for segment, error in encoded if error}
        rows = [row for row in plan.denoise if row not in failed and wanted(row)]
        return Ran(encoded, denoise - began, self.denoise(rows), denoise)

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Encodes each piece, in one go where no mark is on the way.

        A slot in which an encode raised is empty afterwards.
        """
        results: list[Encoded] = []
        # The first segments of all rows go together, then the second ones, and so on.
        for segments in zip_longest(*map(_segments, pieces)):
            failed = {segment.row for segment, error in results if error}
            results += self._encode([s for s in segments if s and s.row not in failed])
        return results

    def denoise(self, rows: Sequence[Row]) -> list[Found]:
        """What one step finds on each row's canvas, or why it could not. Rows left out had no
        room in memory this time and may try again."""
        opened = [(row, self._open(row)) for row in rows]  # apart: what fails here is one row's
        failed: list[Found] = [(row, error) for row, error in opened if error is not None]
        rows = [row for row, error in opened if error is None]
        if self._most is not None and len(rows) <= self._most:
            self._most = None  # the crowd is gone; the next one is tried whole
        return failed + self._in_groups(rows)

    def _open(self, row: Row, again: bool = True) -> Exception | None:
        """Makes ready what a step needs of one row alone; returns what kept it from that. again:
        whether memory that is not enough is freed for a second try."""
        try:
            row.open(self._network).coming()
        except Exception as error:
            if not (again and is_out_of_memory(error)):
                return error
            self._free(error)
            return self._open(row, again=False)
        return None

    def _in_groups(self, rows: Sequence[Row]) -> list[Found]:
        size = self._most or max(1, len(rows))
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        return [found for group in groups for found in self._look(group)]

    def _encode(self, segments: list[Segment]) -> list[Encoded]:
        if not segments:
            return []
        slots = [_slot(segment.row) for segment in segments]
        try:
            # One forward: the network shares a chunk equally among the rows.
            chunk = len(segments) * max(len(segment.ids) for segment in segments)
            self._network.encode([torch.tensor(s.ids) for s in segments], slots, chunk)
            self._network.synchronize()
        except Exception as error:
            if is_out_of_memory(error):
                self._free(error)
            return [(segment, error) for segment in segments]
        for segment in segments:
            self._remember(segment)
        return [(segment, None) for segment in segments]

    def _remember(self, segment: Segment) -> None:
        row = segment.row
        assert row.lease
        row.lease.extend(segment.ids)
        if row.lease.slot.length in row.lease.marks:
            try:
                self._pool.mark(row.lease)
            except Exception:  # a mark only saves work later
                log.exception("a snapshot of slot %d could not be taken", row.lease.index)

    def _look(self, rows: Sequence[Row]) -> list[Found]:
        try:
            return self._batch(rows)
        except Exception as error:
            if is_out_of_memory(error):
                return self._look_fewer(rows, error)
            if len(rows) == 1:
                return [(rows[0], error)]
            log.exception("a batch of %d rows failed; they are run one by one", len(rows))
            return [found for row in rows for found in self._look([row])]

    def _look_fewer(self, rows: Sequence[Row], error: Exception) -> list[Found]:
        self._free(error)
        half = rows[: max(1, len(rows) // 2)]
        try:
            found = self._batch(half)
        except Exception as again:
            if not is_out_of_memory(again):
                return self._look(half)
            self._free(again)
            return [(rows[-1], again)]
        if len(half) < len(rows):
            self._most = len(half)
            found += self._in_groups(rows[len(half) :])
        return found

    def _batch(self, rows: Sequence[Row]) -> list[Found]:
        network = self._network
        canvases = [row.open(network) for row in rows]
        stats = forward(network, canvases, [_slot(row) for row in rows])
        network.synchronize()
        return list(zip(rows, stats, strict=True))

    def _free(self, error: Exception) -> None:
        log.warning("out of memory; freeing what is not in use: %s", error)
        error.__traceback__ = None  # its frames hold the tensors of the failed forward
        gc.collect()
        if self._network.device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _slot(row: Row) -> Slot:
    assert row.lease
    return row.lease.slot


def _segments(piece: Piece) -> list[Segment]:
    """A piece, cut where the slot is to be marked."""
    row = piece.row
    assert row.lease
    start, end = row.encoded, row.encoded + piece.count
    cuts = [start, *(mark for mark in row.lease.marks if start < mark < end), end]
    return [Segment(row, row.prefix[a:b].tolist()) for a, b in pairwise(cuts)]
