"""The rest of a canvas, written token by token: each is the most probable of those that the grammar
allows, by the causal model's scores.

Near the end of the reply's tokens no token is written that leaves too few to close what is open.
Runs nothing: the caller brings the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.diffusion.constraints.grammar_reply import Constraint, GrammarReply
from sfumato.diffusion.constraints.short_completion import MOST_CHOICES, ShortCompletion
from sfumato.diffusion.processors import CanvasView, LogitProcessor

TAIL = 128
"""Tokens before the end of a reply in which it is made sure that the grammar can be closed."""


class CausalWriting:
    """The canvas that is finished so; `ids` grow until `done`."""

    def __init__(
        self,
        constraint: Constraint,
        reply: GrammarReply,
        kept: Sequence[int],
        room: int,
        length: int,
        completion: ShortCompletion,
    ) -> None:
        """reply: the state behind `kept`, the valid tokens of the canvas; room: tokens that the
        reply may still have, with these; length: of the canvas."""
        self.ids = list(kept)
        self.scored: dict[int, Tensor] = {}  # by place: the scores that its token was chosen by
        self.closing = 0  # tokens that were chosen by no scores but to close in time
        self.done = self.is_dead_end = False
        self._constraint, self._reply = constraint, reply.copy()
        self._completion, self._kept = completion, len(kept)
        self._room, self._length = room, length
        self._end: int | None = None
        # So many of the ids, and what closes them: where the reply can end, as far as is known.
        self._safe: tuple[int, list[int]] | None = None
        self._unchecked = 0  # tokens that may be written before that is looked at again
        self._force()

    @property
    def written(self) -> int:
        """Tokens beyond those that were kept."""
        return len(self.ids) - self._kept - self.closing

    @property
    def result(self) -> list[int]:
        """The canvas, with an end token where the reply ends in it."""
        return self.ids if self._end is None else [*self.ids, self._end]

    def write(
        self, scores: Tensor, processors: Sequence[LogitProcessor] = (), reply: Sequence[int] = ()
    ) -> None:
        """Takes one more token. scores float32 [vocabulary], softcapped, of the token that follows
        `ids`; reply: the tokens before this canvas, for the processors."""
        assert not self.done
        following = self._reply.following()
        if following.is_dead_end:
            self.done = self.is_dead_end = True
            return
        changed = _allowed(scores.cpu(), following.mask, processors, [*reply, *self.ids])
        token = int(changed.argmax())
        if token in self._constraint.end_ids:
            self._ends(token)
            return
        if not self._leaves_room(token):
            self._close()
            return
        self.scored[len(self.ids)] = changed
        self._take([token])
        self._force()

    def _leaves_room(self, token: int) -> bool:
        """Whether what is open behind a token can be closed, or is not known to be too much. Looks
        at it the more often the fewer tokens are left beyond those that close it."""
        left = self._room - len(self.ids)
        if left > TAIL:
            return True
        choices = MOST_CHOICES  # of both searches
        if self._safe is None:
            completion = self._completion.find(self._reply, left, choices // 2)
            choices -= self._completion.used
            self._safe = None if completion is None else (len(self.ids), completion)
        if self._unchecked > 0:
            self._unchecked -= 1
            return True
        after = self._completion.find(self._reply.after([token]), left - 1, choices)
        if after is None:
            return self._safe is None
        self._safe = len(self.ids) + 1, after
        self._unchecked = (left - 1 - len(after)) // 4
        return True

    def _close(self) -> None:
        """Ends the reply where that is known to be possible in time; what was written since is
        given up."""
        assert self._safe is not None
        kept, completion = self._safe
        self.ids = [*self.ids[:kept], *completion]
        self.scored = {at: scores for at, scores in self.scored.items() if at < kept}
        self.closing = len(completion)
        self._ends(self._constraint.end_ids[0])

    def _force(self) -> None:
        """Writes what must follow, and sees whether that is the end."""
        following = self._reply.following()
        if forced := following.forced[: self._left]:
            self._take(forced)
        if self._reply.is_complete:
            self._ends(self._constraint.end_ids[0])
        elif self._left == 0:
            self.done = True
            if len(self.ids) == self._room and self._reply.accepts:
                self._ends(self._constraint.end_ids[0])
            elif len(self.ids) == self._room and self._safe is not None:
                self._close()

    @property
    def _left(self) -> int:
        return min(self._room, self._length) - len(self.ids)

    def _take(self, ids: list[int]) -> None:
        self._reply.take(ids)
        self.ids += ids
        self.done = self._left == 0

    def _ends(self, token: int) -> None:
        self._end, self.done = token, True


def _allowed(
    scores: Tensor, mask: Tensor, processors: Sequence[LogitProcessor], reply: Sequence[int]
) -> Tensor:
    """The scores of the allowed tokens as processors change them, -inf elsewhere; unchanged where
    processors leave none."""
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[: len(mask)] = mask[: len(scores)]
    plain = scores.masked_fill(~allowed, float("-inf"))
    before = torch.tensor(reply, dtype=torch.int64)
    none = torch.zeros(1, dtype=torch.int64)
    view = CanvasView(none[0], none, none[None], before)
    changed = scores[None]
    for processor in processors:
        changed = processor.process(changed, 0, view)
    changed = changed[0].masked_fill(~allowed, float("-inf"))
    return changed if (changed > float("-inf")).any() else plain
