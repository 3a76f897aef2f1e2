"""Who waits, who runs, and what each step does: bookkeeping on the host, no tensors.

Requests are admitted strictly in the order in which they came, so that no large one is overtaken
by small ones for ever; only those that wait for what another one encodes let others pass (see
sharing.py). Each step encodes some tokens (prompts and commits alike) and then denoises every row
whose prefix is complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sfumato.engine.row import Row


@dataclass(frozen=True)
class Piece:
    """Encode work of one step: the next `count` tokens of a row's prefix."""

    row: Row
    count: int


@dataclass(frozen=True)
class Plan:
    """One step: the pieces are encoded, then the rows denoised in one batch."""

    encode: tuple[Piece, ...]
    denoise: tuple[Row, ...]


class Scheduler:
    """chunk: tokens encoded in a step at most, all rows together."""

    def __init__(self, chunk: int) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # oldest first
        self._chunk, self._whole = chunk, chunk
        self._short = False  # the memory did not suffice for the last encode work
        self._crowd: set[Row] = set()  # who ran when it last did not

    def admit(self, row: Row) -> None:
        """Moves a row from the line into the batch."""
        self.running.append(row)  # first: others count both, and it is never in neither
        self.waiting.remove(row)

    def remove(self, row: Row) -> None:
        """Forgets a row that has ended."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self._restore()

    def shrink(self, tokens: int) -> bool:
        """Halves the chunk, since the memory did not suffice for so many tokens. Whether the
        last encode work had failed in the same way."""
        before, self._short, self._crowd = self._short, True, set(self.running)
        self._chunk = max(1, min(self._chunk, tokens) // 2)
        return before

    def relax(self) -> None:
        """Some encode work was done."""
        self._short = False
        self._restore()

    def _restore(self) -> None:
        """Restores the full prefill chunk after an out-of-memory back-off, once one of the rows
        that ran at the time has ended and no row has tokens left to encode: sooner, a long prompt
        might fail and start over for ever."""
        if not (self._crowd.issubset(self.running) or any(row.pending for row in self.running)):
            self._chunk, self._crowd = self._whole, set()

    def plan(self) -> Plan:
        """The step to come."""
        pieces = self._pieces()
        done = {piece.row for piece in pieces if piece.count == piece.row.pending}
        ready = tuple(row for row in self.running if not row.pending or row in done)
        return Plan(pieces, ready)

    def _pieces(self) -> tuple[Piece, ...]:
        """Shares the chunk: half of it is the oldest row's, so that a long prompt always moves; the
        rest goes to those that need least, so that a commit never waits behind a long prompt. What
        others leave is the oldest row's too. Shared equally, it would have all finish late."""
        rows = [row for row in self.running if row.pending]
        rows = [row for row in rows if row.alone][:1] or rows
        if not rows:
            return ()
        oldest, *others = rows
        counts = {oldest: min(oldest.pending, -(-self._chunk // 2))}
        left = self._chunk - counts[oldest]
        for row in sorted(others, key=lambda row: row.pending):  # stable: of equals the older
            counts[row] = min(row.pending, left)
            left -= counts[row]
        counts[oldest] += min(left, oldest.pending - counts[oldest])
        return tuple(Piece(row, counts[row]) for row in rows if counts[row])
