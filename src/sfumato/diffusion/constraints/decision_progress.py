"""A decision under way: which of its reads are done, which are open, and what is read next."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.diffusion.constraints.answers import Answer, Sample
from sfumato.diffusion.constraints.decision_plan import DecisionPlan
from sfumato.diffusion.constraints.read import PIECE, OpenRead, Turn, next_turn
from sfumato.model.cache import Slot


class DecisionProgress:
    """Its reads are taken in order, as many at a time as tokens are given for."""

    def __init__(self, plan: DecisionPlan) -> None:
        self.plan = plan
        self._results: list[Sequence[tuple[Sample, ...]]] = [()] * len(plan.reads)
        self._begun = 0  # reads, of the plan's
        self._open: dict[int, OpenRead] = {}  # by number
        self.canvases = 0  # that were read

    @property
    def holds_long(self) -> bool:
        """Whether a read is open whose question has more than one piece: these are worth memory."""
        return any(len(read.ids) > PIECE for read in self._open.values())

    @property
    def begins_long(self) -> bool:
        """Whether such a read is next."""
        reads = self.plan.reads[self._begun : self._begun + 1]
        return not self._open and any(len(read.ids) > PIECE for read in reads)

    @property
    def done(self) -> bool:
        return self._begun == len(self.plan.reads) and not self._open

    def turns(self, slot: Slot, tokens: int) -> list[Turn]:
        """What is read next, of at most so many tokens or of one read. slot: holds the prefix."""
        turns: list[Turn] = []
        left = tokens
        for begun in self._open.values():
            if not turns or left > 0:
                turns.append(next_turn(begun, left))
                left -= turns[-1].tokens
        while self._begun < len(self.plan.reads) and (not turns or left > 0):
            read = self.plan.reads[self._begun]
            if turns and (len(read.ids) > PIECE or len(read.ids) + read.canvas_tokens > left):
                break
            number, self._begun = self._begun, self._begun + 1
            self._open[number] = OpenRead(read, slot, self.plan.key, self.plan.settings)
            turns.append(next_turn(self._open[number], left))
            left -= turns[-1].tokens
        return turns

    def collect(self) -> None:
        """Closes the reads that are done. Those that go on keep their own tokens' memory alone."""
        for number, read in list(self._open.items()):
            if read.done:
                self._results[number] = read.samples
                self.canvases += len(read.samples) * len(read.read.canvases)
                del self._open[number]
            else:
                read.scratch.own()

    def answers(self) -> dict[str, Answer]:
        """Once all is done."""
        assert self.done
        return self.plan.answers(self._results)
