"""From questions to ids: the prompt of a read, and the canvas whose slots are read.

The texts around a user's message, the tokenizer and the tokens of a canvas come from the model's
text side and its family.  Each part of a prompt is tokenized by itself, so that the tokens of a
state never depend on the question that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sfumato.diffusion.constraints.labels import Encode, Line
from sfumato.diffusion.constraints.wording import BETWEEN
from sfumato.diffusion.step.batch import WIDTHS

NOISE = -1
"""Stands in a canvas where noise goes."""


@dataclass(frozen=True)
class ReadCanvas:
    """A pinned template: tokens, and the places that are open."""

    ids: tuple[int, ...]  # NOISE at the open places
    slots: tuple[int, ...]  # the open places that are read
    labels: tuple[tuple[int, ...], ...]  # of each slot

    @property
    def open(self) -> tuple[int, ...]:
        return tuple(place for place, token in enumerate(self.ids) if token == NOISE)


@dataclass(frozen=True, eq=False)
class ReadTemplate:
    """How a model reads questions."""

    head: tuple[int, ...]  # of the prompt, up to the user's text
    tail: tuple[int, ...]  # from the end of the user's text on
    encode: Encode
    end_id: int  # what an answer on the canvas ends with
    filler_id: int  # what fills the canvas behind it
    canvas_length: int  # of the checkpoint
    vocab_size: int
    longest_token: int  # characters
    _lines: dict[tuple[str, str], Line] = field(default_factory=dict, repr=False)

    def line(self, before: str = "", after: str = "") -> Line:
        """A line with a label; remembered, since its labels cost calls of the tokenizer."""
        key = before, after
        if key not in self._lines:
            self._lines[key] = Line(self.encode, before, after)
        return self._lines[key]

    def prefix(self, state: str) -> list[int]:
        """The ids that come before every question where the state does."""
        return [*self.head, *self.encode(state)]

    def after_state(self, question: str) -> list[int]:
        """The ids of a question that follows its state."""
        return [*self.encode(BETWEEN + question), *self.tail]

    def before_state(self, question: str, state: Sequence[int]) -> list[int]:
        """The ids behind `head` where the question comes first; state: `then`."""
        return [*self.encode(question), *state, *self.tail]

    def then(self, state: str) -> list[int]:
        """The ids of a state that follows its question."""
        return self.encode(BETWEEN + state)

    def canvas(
        self,
        body: Sequence[int],
        slots: Sequence[int],
        labels: Sequence[Sequence[int]],
    ) -> ReadCanvas | None:
        """The narrowest canvas that holds a body, its end and filler; None where no width does.

        At least one token of filler stands there: without it, a model puts less of its probability
        on labels."""
        width = self.width(len(body) + 2)
        if width is None:
            return None
        filler = [self.filler_id] * (width - len(body) - 1)
        ids = (*body, self.end_id, *filler)
        return ReadCanvas(ids, tuple(slots), tuple(tuple(each) for each in labels))

    def width(self, tokens: int) -> int | None:
        """The narrowest canvas of so many tokens."""
        widths = (*(width for width in WIDTHS if width < self.canvas_length), self.canvas_length)
        return next((width for width in widths if width >= tokens), None)
