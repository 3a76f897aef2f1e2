"""Which rows wait, which have a slot, and what each step does: bookkeeping, no tensors.

Requests are admitted strictly in the order in which they came, so that no large one is overtaken
by small ones for ever; only those that wait for what another one encodes let others pass (see
sharing.py). Each step encodes some tokens (prompts and commits alike) and then denoises every row
whose prefix is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sfumato.engine.any_row import AnyRow
from sfumato.engine.decision_row import DecisionRow
from sfumato.engine.fill_row import FillRow
from sfumato.engine.row import Row
from sfumato.engine.sharing import Sharing
from sfumato.engine.slots import SlotPool


@dataclass(frozen=True)
class Piece:
    """Encode work of one step: the next `count` tokens of a row's prefix."""

    row: AnyRow
    count: int


@dataclass(frozen=True)
class Plan:
    """One step: the pieces are encoded, then the rows denoised in one batch; then rows write a
    token each under a grammar, tokens are drawn in causal mode, questions are read, and the
    canvases of fills denoised in another batch."""

    encode: tuple[Piece, ...]
    denoise: tuple[Row, ...]
    write: tuple[Row, ...] = ()  # rows whose canvas is finished token by token
    draw: tuple[Row, ...] = ()  # causal rows, each of which gets a token
    read: tuple[DecisionRow, ...] = ()
    fill: tuple[FillRow, ...] = ()
    decisions: int = 0  # that share the reads of a step, those with them that still encode
    read_tokens: int = 0  # of all of them


class PrefillChunk:
    """Tokens that a step encodes at most, all rows together: fewer after a memory shortage."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self._full = tokens
        self._has_failed = False  # the memory did not suffice for the last encode work
        self._rows_then: set[AnyRow] = set()  # that ran when it last did not

    def shrink(self, tokens: int, running: Iterable[AnyRow]) -> bool:
        """Halves the chunk, since the memory did not suffice for so many tokens. Whether the last
        encode work had failed in the same way."""
        before, self._has_failed, self._rows_then = self._has_failed, True, set(running)
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        return before

    def succeeded(self, running: Sequence[AnyRow]) -> None:
        """Some encode work was done."""
        self._has_failed = False
        self.restore(running)

    def restore(self, running: Sequence[AnyRow]) -> None:
        """Restores the full chunk after a memory shortage, once one of the rows that ran at the
        time has ended and no row has tokens left to encode: sooner, a long prompt might fail and
        start over for ever."""
        if not (self._rows_then.issubset(running) or any(row.pending for row in running)):
            self.tokens, self._rows_then = self._full, set()


class Scheduler:
    """The queue, the batch, and the slots that their rows have."""

    def __init__(
        self,
        pool: SlotPool,
        prefill_chunk: int,
        clock: Callable[[], float],
        most_read: int | None = None,
    ) -> None:
        """prefill_chunk: tokens encoded in a step at most, all rows together; most_read: tokens of
        a step's reads, None as many."""
        self.waiting: deque[AnyRow] = deque()
        self.running: list[AnyRow] = []  # oldest first
        self.pool, self.chunk = pool, PrefillChunk(prefill_chunk)
        self._sharing, self._clock = Sharing(pool), clock
        self._most_read = prefill_chunk if most_read is None else most_read

    def admit(self) -> list[tuple[AnyRow, Exception]]:
        """Gives slots to waiting rows, strictly in order, as long as there are any. A row that
        waits for what another row encodes needs none yet. Returns the rows for which there can be
        no slot, and why."""
        refused: list[tuple[AnyRow, Exception]] = []
        for row in tuple(self.waiting):
            if self._sharing.waits(row, self.running):
                continue
            if row.first_in_queue is None:
                row.first_in_queue = self._clock()
            try:
                if not self._lease(row):
                    break
            except Exception as error:
                refused.append((row, error))
            else:
                self.running.append(row)  # first: others count both, and it is never in neither
                self.waiting.remove(row)
        return refused

    def restart(self, row: AnyRow) -> bool:
        """Another slot for a running row, whose own an encode has emptied. Whether there is one."""
        self._release(row, keep=False)
        return self._lease(row)

    def remove(self, row: AnyRow) -> None:
        """Removes a row that has ended, and ends the lease of its slot."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self.chunk.restore(self.running)
        self._release(row, keep=True)

    def _lease(self, row: AnyRow) -> bool:
        """Whether there is a slot for a row now, which then has it."""
        lease = self.pool.lease(row.cache_key, row.need, row.prompt.marks)
        if lease is not None:
            row.leased(lease, self._clock())
        return lease is not None

    def _release(self, row: AnyRow, keep: bool) -> None:
        lease, row.lease = row.lease, None
        if lease is not None:
            self.pool.release(lease, keep)

    def plan(self) -> Plan:
        """The step to come."""
        pieces = self._pieces()
        done = {piece.row for piece in pieces if piece.count == piece.row.pending}
        ready = [row for row in self.running if not row.pending or row in done]
        replies = [row for row in ready if isinstance(row, Row) and row.prepared.writes]
        draw = tuple(row for row in replies if row.is_causal)
        write = tuple(row for row in replies if row.writing is not None)
        denoise = tuple(row for row in replies if not row.is_causal and row.writing is None)
        read = tuple(row for row in ready if isinstance(row, DecisionRow))
        fill = tuple(row for row in ready if isinstance(row, FillRow))
        decisions = sum(isinstance(row, DecisionRow) for row in self.running)
        tokens = self._read_tokens(denoise)
        return Plan(pieces, denoise, write, draw, read, fill, decisions, tokens)

    def _read_tokens(self, denoise: Sequence[Row]) -> int:
        """How many tokens all reads of a step have: as many as the canvases that are denoised in
        it, for the step not to take more than twice as long."""
        most = min(self.chunk.tokens, self._most_read)
        return min(most, sum(row.canvas_length for row in denoise)) if denoise else most

    def _pieces(self) -> tuple[Piece, ...]:
        """Shares the chunk: half of it is the oldest row's, so that a long prompt always moves; the
        rest goes to those that need least, so that a commit never waits behind a long prompt. What
        others leave is the oldest row's too. Shared equally, it would have all finish late."""
        rows = [row for row in self.running if row.pending]
        rows = [row for row in rows if row.encodes_alone][:1] or rows
        if not rows:
            return ()
        oldest, *others = rows
        counts = {oldest: min(oldest.pending, -(-self.chunk.tokens // 2))}
        left = self.chunk.tokens - counts[oldest]
        for row in sorted(others, key=lambda row: row.pending):  # stable: of equals the older
            counts[row] = min(row.pending, left)
            left -= counts[row]
        counts[oldest] += min(left, oldest.pending - counts[oldest])
        return tuple(Piece(row, counts[row]) for row in rows if counts[row])
