"""Turns of decisions: whose questions are read in a step, and how much of a step they take.

Reads share a step with replies that denoise, so that a decision of a thousand questions must stop
none of these, nor another decision of one question.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.read import Turn, take_turns
from sfumato.diffusion.step.batch import WIDTHS
from sfumato.diffusion.step.read_forwards import ReadForwards
from sfumato.engine.decision_row import DecisionRow
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

_Owned = tuple[DecisionRow, Turn]


@dataclass(frozen=True)
class ReadResult:
    """What a step's turns gave a row: nothing, or an error."""

    row: DecisionRow
    tokens: int  # that went through the network
    error: Exception | None


class ReadTurns:
    """Takes the turns of rows.

    A batch that raises is taken again in halves, so that only those decisions fail of which one
    turn raises by itself. Where memory ran out, a turn that is left alone goes through the network
    in smaller forwards, down to one canvas of one sample, and the steps that follow read half as
    many tokens, until no decision is left.
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

    def run(self, rows: Sequence[DecisionRow], tokens: int, decisions: int) -> list[ReadResult]:
        """Reads for the rows whose last turn is longest ago, each an equal share of so many tokens
        or one read. decisions: how many share them, those with them that still encode."""
        if not decisions:
            self._limit = None
        if self._limit is not None:
            tokens = min(tokens, self._limit)
        turns: dict[DecisionRow, list[Turn]] = {}
        used = 0
        # One long question is open at a time, since it takes the memory of a slot of its length.
        has_long = any(row.progress.holds_long for row in rows)
        for row in sorted(rows, key=lambda row: row.turn_number):
            if turns and used >= tokens:
                break
            if row.progress.begins_long:
                if has_long:
                    continue
                has_long = True
            turns[row] = row.turns(tokens // max(1, decisions))
            row.turn_number, self._turns = self._turns, self._turns + 1
            used += sum(turn.tokens for turn in turns[row])
        errors: dict[DecisionRow, Exception] = {}
        self._take([(row, turn) for row, own in turns.items() for turn in own], errors)
        return [
            ReadResult(row, sum(turn.tokens for turn in own), errors.get(row))
            for row, own in turns.items()
        ]

    def _take(
        self,
        items: Sequence[_Owned],
        errors: dict[DecisionRow, Exception],
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
