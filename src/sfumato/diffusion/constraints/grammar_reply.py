"""Where a reply stands under a grammar: the thought, which is free, and the answer, which is not.

Reads tokens that may still change, and takes those that are settled.  Decides nothing about steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sfumato.diffusion.constraints.grammar import Grammar, GrammarState


@dataclass(frozen=True, eq=False)
class Constraint:
    """What the tokens of a reply must satisfy."""

    grammar: Grammar
    thought: tuple[int, int] | None = None  # ids that open and close a thought; None: none may come
    quote: int | None = None  # a special token that closes texts

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.grammar.tokens.end_ids


@dataclass(frozen=True)
class Reading:
    """How tokens that may follow a reply agree with the grammar."""

    valid: int  # so many of them do, the first ones, an end token not counted
    ended: bool  # the next one is an end token, and may stand there
    answer: int  # so many of the valid ones come before the answer


@dataclass(frozen=True)
class Continuation:
    """What may follow some tokens."""

    forced: list[int]
    mask: Tensor  # bool [vocabulary], of the position after the forced ones
    complete: bool  # nothing but an end token may follow

    @property
    def is_dead_end(self) -> bool:
        """Whether no token may stand behind the forced ones."""
        return not bool(self.mask.any())


class GrammarReply:
    """The state of one reply."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._state = constraint.grammar.begin()
        self._thinks: bool | None = None if constraint.thought else False  # None: not begun

    def copy(self) -> GrammarReply:
        """An independent state."""
        copied = GrammarReply(self._constraint)
        copied._state, copied._thinks = self._state.copy(), self._thinks
        return copied

    def read(self, ids: list[int]) -> Reading:
        """How the ids agree with the grammar that may follow what was taken."""
        ends = self._constraint.end_ids
        end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        answer = self._answer(ids)
        if answer is None or answer > end:
            return Reading(end, False, end)  # a reply may not end in its thought
        valid = answer + self._state.valid(ids[answer:end])
        if valid < end or end == len(ids):
            return Reading(valid, False, answer)
        after = self._state.copy()
        after.take(ids[answer:end])
        return Reading(end, after.accepts, answer)

    def take(self, ids: list[int]) -> None:
        """Moves on by ids that are valid."""
        answer = self._answer(ids)
        if answer is None:
            self._thinks = True
        elif ids:
            self._thinks = False
            self._state.take(ids[answer:])

    def after(self, ids: list[int]) -> GrammarReply:
        """The state behind valid ids; this one stays."""
        moved = self.copy()
        moved.take(ids)
        return moved

    def following(self) -> Continuation:
        """What may follow here."""
        tokens = self._constraint.grammar.tokens
        if self._thinks:
            mask = self._state.mask().fill_(True)
            mask[[*tokens.end_ids]] = False
            return Continuation([], mask, False)
        forced = [] if self._thinks is None else self._state.forced()
        state = self._state.copy()
        state.take(forced)
        mask = state.mask()
        if self._thinks is None:
            assert self._constraint.thought
            mask[self._constraint.thought[0]] = True
        return Continuation(forced, mask, state.is_complete)

    def answer_state(self) -> GrammarState:
        """A copy of the grammar's own state."""
        return self._state.copy()

    @property
    def thinks(self) -> bool:
        """Whether a thought is open."""
        return self._thinks is True

    @property
    def accepts(self) -> bool:
        """Whether the reply may end here."""
        return not self._thinks and self._state.accepts

    @property
    def is_complete(self) -> bool:
        """Whether the reply may end here, and nothing may follow."""
        return not self._thinks and self._state.is_complete

    def _answer(self, ids: list[int]) -> int | None:
        """Where the answer begins among ids that follow; None where it does not."""
        if self._thinks is False:
            return 0
        assert self._constraint.thought
        opens, closes = self._constraint.thought
        if self._thinks is None and ids[:1] != [opens]:
            return 0
        return ids.index(closes) + 1 if closes in ids else None
