"""The canvas on its way from noise to text: drafts in, styled lines out.

Pure: no terminal, no clock. The number of lines is set when a canvas begins and holds until it is
committed, so that nothing below it moves. Every position may change until then, and is drawn so:
an accepted one merely stops being dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.text import Text

from sfumato.cli.view.token_text import Pieces, harmless
from sfumato.cli.view.wrap import Line, wrap

# By steps since the token changed: a fresh one glows, and fades.
GLOW = ("bold bright_yellow", "bright_yellow", "yellow")
HAZE_GLOW = ("yellow", "dim yellow", "dim yellow")
SETTLED, HAZE, THOUGHT = "", "dim", "dim italic"

LEAST_WIDTH = 4  # a wide character and room to break
_CELLS_PER_TOKEN = 4.5  # of English text in a large vocabulary
_TOKENS_PER_LINE = 10  # of text in short lines: code, lists, boards


class CanvasDrawing:
    """One reply's canvases, one after another.

    `carry` is the last line of what has been committed, to which the next canvas adds.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._pieces = Pieces(decode)
        self.carry = Text()
        self._canvas = -1
        self._ids: list[int] = []
        self._accepted: list[bool] = []
        self._ages: list[int] = []
        self._breaks: frozenset[int] | None = None
        self._size: tuple[int, int] | None = None
        self._rows = 0

    def draft(self, canvas: int, ids: Sequence[int], accepted: Sequence[bool]) -> None:
        """Take in a draft. Tokens that differ from the draft before begin to glow."""
        if canvas != self._canvas or len(ids) != len(self._ids):
            self._canvas, self._ages, self._breaks, self._size = canvas, [0] * len(ids), None, None
        else:
            pairs = zip(ids, self._ids, self._ages, strict=True)
            self._ages = [age + 1 if new == old else 0 for new, old, age in pairs]
        self._ids, self._accepted = list(ids), list(accepted)

    def commit(self, text: str, width: int, thought: str = "") -> list[Text]:
        """End the canvas with what it adds; returns the lines that are now complete.

        The unfinished last line stays in `carry`.
        """
        self._ids, self._ages, self._accepted, self._size = [], [], [], None
        return [*self._add(thought, THOUGHT, width), *self._add(text, SETTLED, width)]

    def _add(self, text: str, style: str, width: int) -> list[Text]:
        if not text:
            return []
        complete = self.finish() if self.carry.style != style else []
        words = re.findall(r"\s|\S+", self.carry.plain + harmless(text))
        for line in wrap(words, _usable(width), frozenset()).lines:
            complete.append(Text("".join(part.text for part in line), style))
        self.carry = complete.pop()
        return complete

    def abandon(self, text: str, width: int, height: int) -> list[Text]:
        """End the canvas before it has settled: `text`, which belongs before it, and the draft as
        it stands, in lines."""
        if not self._ids:
            return [*self.commit(text, width), *self.finish()]
        above = self._add(text, SETTLED, width)
        draft = self.lines(width, height)
        while draft and not draft[-1].plain.strip():
            draft.pop()
        self.commit("", width)
        self.carry = Text()
        return [*above, *draft]

    def finish(self) -> list[Text]:
        """The last line, when nothing follows it."""
        last, self.carry = self.carry, Text()
        return [last] if last else []

    @property
    def accepted(self) -> int:
        """Accepted positions that have something to show."""
        shown = self._pieces(self._ids)
        return sum(bool(piece) and ok for piece, ok in zip(shown, self._accepted, strict=True))

    @property
    def share(self) -> float:
        """The accepted share of the canvas, 0 to 1; it may fall again."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else 0.0

    def lines(self, width: int, height: int) -> list[Text]:
        """The canvas in at most `height` lines of at most `width` cells.

        While a canvas is being denoised there are always equally many, unless the size changes.
        """
        width = _usable(width)
        if self._size != (width, height):
            self._size, self._breaks = (width, height), None
            self._rows = self._lines_for(len(self._ids), width, height)
        wrapped = wrap([self.carry.plain, *self._pieces(self._ids)], width, self._breaks)
        self._breaks = wrapped.breaks
        drawn = [self._draw(line) for line in wrapped.lines[: self._rows]]
        return drawn + [Text() for _ in range(self._rows - len(drawn))]

    def _draw(self, line: Line) -> Text:
        text = Text()
        for style, run in groupby(line, key=lambda part: self._style(part.piece - 1)):
            text.append("".join(part.text for part in run), style)
        return text

    def _style(self, position: int) -> str:
        if position < 0:  # the carry, which is the first piece
            return str(self.carry.style)
        age, accepted = self._ages[position], self._accepted[position]
        if age < len(GLOW):
            return GLOW[age] if accepted else HAZE_GLOW[age]
        return SETTLED if accepted else HAZE

    def _lines_for(self, length: int, width: int, height: int) -> int:
        prose = self.carry.cell_len + length * _CELLS_PER_TOKEN
        return max(1, min(height, max(-int(-prose // width), -(-length // _TOKENS_PER_LINE))))


def _usable(width: int) -> int:
    return max(LEAST_WIDTH, width)
