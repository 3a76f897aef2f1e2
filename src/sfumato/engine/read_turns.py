"""Turns of decisions: whose questions are read in a step, and how much of a step they take.

Reads share a step with replies that denoise, so that a decision of a thousand questions must stop
none of these, nor another decision of one question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.read import Turn, take_turns
from sfumato.engine.decision_row import DecisionRow
from sfumato.engine.recovery import BatchRecovery
from sfumato.model.network import Network

TURN = 256
"""Tokens of the reads of a step on a CPU, where a step takes as long as its tokens; another device
takes as many as a chunk of a prefill has."""


@dataclass(frozen=True)
class ReadResult:
    """What a step's turns gave a row: nothing, or an error."""

    row: DecisionRow
    tokens: int  # that went through the network
    error: Exception | None


class ReadTurns:
    """Takes the turns of rows."""

    def __init__(self, network: Network, free: Callable[[Exception], None]) -> None:
        """free: gives back unused memory, after an error for want of it."""
        self._network, self._turn_number = network, 0
        self._batches = BatchRecovery(self._take, free)

    def run(self, rows: Sequence[DecisionRow], tokens: int, decisions: int) -> list[ReadResult]:
        """Reads for the rows whose last turn is longest ago, each an equal share of so many tokens
        or one read. decisions: how many share them, those with them that still encode."""
        share = tokens // max(1, decisions)
        chosen: list[tuple[DecisionRow, Turn]] = []
        owners: list[DecisionRow] = []
        used = 0
        for row in sorted(rows, key=lambda row: row.turn_number):
            if owners and used >= tokens:
                break
            turns = row.turns(share)
            row.turn_number, self._turn_number = self._turn_number, self._turn_number + 1
            chosen += [(row, turn) for turn in turns]
            used += sum(turn.tokens for turn in turns)
            owners.append(row)
        errors: dict[DecisionRow, Exception] = {}
        for (row, _), result in self._batches.run(chosen):
            if isinstance(result, Exception):
                errors.setdefault(row, result)
        tokens_of = {row: sum(turn.tokens for own, turn in chosen if own is row) for row in owners}
        return [ReadResult(row, tokens_of[row], errors.get(row)) for row in owners]

    def _take(self, turns: Sequence[tuple[DecisionRow, Turn]]) -> list[None]:
        take_turns(self._network, [turn for _, turn in turns])
        self._network.synchronize()
        return [None] * len(turns)
