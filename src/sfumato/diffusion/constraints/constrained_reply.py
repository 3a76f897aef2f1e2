"""How one reply is held to its grammar, canvas by canvas.

A canvas denoises freely until an accepted position breaks the grammar.  From then on each step
takes over the longest valid and accepted beginning, pins what the grammar forces behind it, and
masks the position after that.  A canvas that stops with something invalid is denoised again behind
its valid beginning, at most REPAIRS times; what is left then is written token by token
(`causal_writing.py`).  Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.diffusion.canvas import Guidance
from sfumato.diffusion.constraints.causal_writing import TAIL, CausalWriting
from sfumato.diffusion.constraints.grammar_reply import Constraint, GrammarReply
from sfumato.diffusion.constraints.short_completion import MOST_CHOICES, ShortCompletion

REPAIRS = 2
"""Times that the rest of a canvas is denoised again."""
_STEPS_BACK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""How many tokens of a text that cannot be closed any more are given up, tried in this order."""


@dataclass
class ConstraintReport:
    """What a constraint took, of one reply."""

    steps: int = 0  # denoising steps that the grammar guided
    repairs: int = 0  # canvases whose rest was denoised again
    causal_tokens: int = 0  # written one after another
    closing_tokens: int = 0  # chosen by the grammar alone, for the reply to end in time


@dataclass(frozen=True)
class Verdict:
    """What becomes of a canvas that has stopped. One of the three."""

    settled: list[int] | None = None  # its tokens, an end token included where the reply ends
    again: bool = False  # its rest is denoised again
    writing: CausalWriting | None = None  # its rest is written token by token


class ConstrainedReply:
    """The constraint of one reply."""

    def __init__(self, constraint: Constraint) -> None:
        self.report = ConstraintReport()
        self._constraint, self._completion = constraint, ShortCompletion(constraint)
        self._reply = GrammarReply(constraint)  # behind all settled canvases
        self._kept: list[int] | None = None  # of the canvas under way; None: it denoises freely
        self._repairs = 0  # of this canvas

    def begin(self, length: int) -> Guidance | None:
        """What the first step of a canvas of so many positions is asked; None: nothing."""
        return None if self._kept is None else self._guidance(self._kept, length)

    def guide(
        self, ids: list[int], accepted: list[bool], room: int, length: int
    ) -> Guidance | None:
        """What the next step is asked after one with these most probable tokens; None: nothing.
        room: tokens that the reply may still have."""
        seen = ids[:room]
        reading = self._reply.read(seen)
        first_open = next((n for n, kept in enumerate(accepted) if not kept), len(accepted))
        if self._kept is None:
            fits = reading.ended or reading.valid == len(seen)
            if fits or first_open <= reading.valid:
                return None
        self._kept = seen[: min(reading.valid, first_open)]
        return self._guidance(self._kept, length)

    def _guidance(self, kept: list[int], length: int) -> Guidance:
        self.report.steps += 1
        following = self._reply.after(kept).following()
        fixed = [*kept, *following.forced]
        pins = dict(enumerate(fixed[:length]))
        if len(fixed) >= length or following.is_dead_end:
            return Guidance(pins)
        return Guidance(pins, len(fixed), following.mask)

    def stopped(self, ids: list[int], room: int, length: int) -> Verdict:
        """What becomes of a canvas of `length` positions that has stopped with these tokens."""
        reading = self._reply.read(ids[: room + 1])  # an end token may stand behind the last
        kept = ids[: min(reading.valid, room)]
        after = self._reply.after(kept)
        if (reading.ended and reading.valid <= room) or after.is_complete:
            return self._settled([*kept, self._end(ids, len(kept))])
        if len(kept) == room and after.accepts:  # what closes it is nothing
            return self._settled([*kept, self._constraint.end_ids[0]])
        is_open = len(kept) == min(len(ids), room)
        left = room - len(kept)
        if left <= TAIL and self._completion.find(after, left, MOST_CHOICES // 2) is None:
            closed = self._closed(kept, room, MOST_CHOICES - self._completion.used)
            if closed is not None:
                return self._settled([*closed, self._constraint.end_ids[0]])
            if is_open:
                return self._settled(kept)
        if is_open:
            return self._settled(kept)
        if self._repairs < REPAIRS and not after.following().is_dead_end:
            self._repairs, self._kept = self._repairs + 1, kept
            self.report.repairs += 1
            return Verdict(again=True)
        writing = CausalWriting(self._constraint, after, kept, room, length, self._completion)
        return Verdict(writing=writing)

    def written(self, writing: CausalWriting) -> list[int]:
        """The tokens of a canvas whose writing is done."""
        self.report.causal_tokens += writing.written
        self.report.closing_tokens += writing.closing
        return self._settled(writing.result).settled or []

    def took(self, added: list[int]) -> None:
        """A settled canvas has added these tokens to the reply."""
        self._reply.take(added)
        self._kept, self._repairs = None, 0

    def _settled(self, ids: list[int]) -> Verdict:
        return Verdict(settled=ids)

    def _end(self, ids: list[int], at: int) -> int:
        """The end token at a place; where there is none, the first of the vocabulary's."""
        ends = self._constraint.end_ids
        return ids[at] if at < len(ids) and ids[at] in ends else ends[0]

    def _closed(self, kept: list[int], room: int, choices: int) -> list[int] | None:
        """The tokens with the end given up for one that closes them in time; None where none was
        found with so many choices in all. Each search has an equal share, and what those before it
        left."""
        ends = [back for back in _STEPS_BACK if back <= len(kept)]
        for done, back in enumerate(ends):
            beginning = kept[: len(kept) - back]
            after, left = self._reply.after(beginning), room - len(beginning)
            completion = self._completion.find(after, left, choices // (len(ends) - done))
            choices -= self._completion.used
            if completion is not None:
                self.report.closing_tokens += len(completion)
                return [*beginning, *completion]
        return None
