"""Scores of a step: whose items are scored, and how much of the step they take.

Scores share a step with canvases that denoise, so that a task of a thousand questions must stop
none of these, nor another task of one question.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.read import Turn, take_turns
from sfumato.diffusion.step.batch import WIDTHS
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.engine.queue.scheduler import Share
from sfumato.engine.row import Row
from sfumato.model.cache import Slot
from sfumato.model.devices import is_out_of_memory
from sfumato.model.network import PREFILL_CHUNK, Network

log = logging.getLogger(__name__)

_Owned = tuple[Row, Turn]


@dataclass(frozen=True)
class Scored:
    """What a step's scores gave a row: nothing, or an error."""

    row: Row
    tokens: int  # that went through the network
    is_read: bool  # whether questions were among what was scored
    error: Exception | None


class ScoreTurns:
    """Takes the turns of rows.

    A batch of reads that raises is taken again in halves, so that only those rows fail of which one
    turn raises by itself. Where memory ran out, a turn that is left alone goes through the network
    in smaller forwards, down to one canvas of one sample, and the steps that follow read half as
    many tokens, until no row is left.
    """

    def __init__(
        self,
        network: Network,
        free: Callable[[Exception], None],
        forwards: ReadForwards | None = None,
    ) -> None:
        """free: gives back unused memory, after an error for want of it; forwards: of a device that
        works by itself."""
        self._network, self._free, self._forwards = network, free, forwards
        self._turns = 0  # of all rows
        self._limit: int | None = None  # tokens, after a memory shortage

    def run(self, share: Share) -> list[Scored]:
        """Scores for the rows whose last turn is longest ago, each an equal share of the tokens or
        one item."""
        if not share.sharers:
            self._limit = None
        tokens = share.tokens if self._limit is None else min(share.tokens, self._limit)
        turns: dict[Row, list[Turn]] = {}
        sizes: dict[Row, int] = {}
        # One long question is open at a time, since it takes the memory of a slot of its length.
        has_long = any(row.score.holds_long for row in share.rows)
        for row in sorted(share.rows, key=lambda row: row.turn):
            if turns and sum(sizes.values()) >= tokens:
                break
            if row.score.begins_long:
                if has_long:
                    continue
                has_long = True
            turns[row] = row.score.turns(_slot(row), tokens // max(1, share.sharers))
            row.turn, self._turns = self._turns, self._turns + 1
            sizes[row] = sum(turn.tokens for turn in turns[row]) + row.score.line_tokens
        errors: dict[Row, Exception] = {}
        reads = [(row, turn) for row, own in turns.items() for turn in own]
        if reads:
            self._take(reads, errors)
        for row in turns:
            if row not in errors and (error := self._score_lines(row)) is not None:
                errors[row] = error
        return [Scored(row, sizes[row], bool(own), errors.get(row)) for row, own in turns.items()]

    def _score_lines(self, row: Row) -> Exception | None:
        """Scores the likelihoods of a row's turn; returns what kept it from that."""
        if not row.score.line_tokens:
            return None
        try:
            row.score.score_lines(self._network, _slot(row), row.prefix)
            self._network.synchronize()
        except Exception as error:
            if is_out_of_memory(error):
                self._free(error)
            return error
        return None

    def _take(
        self,
        items: Sequence[_Owned],
        errors: dict[Row, Exception],
        together: int = PREFILL_CHUNK,
    ) -> None:
        """Takes the turns, and adds what one raised by itself to the errors. together: tokens of a
        forward at most."""
        total = sum(turn.tokens for _, turn in items)
        smaller = 0
        try:
            take_turns(self._network, [turn for _, turn in items], together, self._forwards)
            return
        except Exception as error:
            if is_out_of_memory(error):
                self._limit = max(1, total // 2)
                smaller = min(together, total) // 2
                self._free(error)
            elif len(items) > 1:
                log.exception("%d reads failed together; they are read in halves", len(items))
            # Of fewer tokens than the narrowest canvas each forward has one canvas already.
            if len(items) == 1 and smaller < WIDTHS[0]:
                errors.setdefault(items[0][0], error)
                return
        if len(items) == 1:
            self._take(items, errors, smaller)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            self._take([item for item in part if item[0] not in errors], errors)


def _slot(row: Row) -> Slot:
    assert row.lease
    return row.lease.slot
