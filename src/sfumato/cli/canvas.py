"""The canvas on its way from noise to text: drafts in, styled lines out.

Pure: no terminal, no clock. The number of lines is set when a canvas begins and holds until it is
committed, so that nothing below it moves. Every position may change until then, and is drawn so:
an accepted one merely stops being dim. A canvas changes many times before it is done. Broken afresh
each time, its lines would jump about; so breaks stay at the tokens where they were as long as the
lines fit.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from rich.text import Text

_UNDECODED = "\ufffd"
_REORDERING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def harmless(text: str) -> str:
    """Text in which only newlines control the terminal: a model may write escape codes too."""
    if text.isprintable():
        return text
    return "".join(map(_harmless_character, text.replace("\r\n", "\n").replace("\t", "    ")))


def _harmless_character(character: str) -> str:
    if character == "\n":
        return character
    unsafe = unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERING
    return "·" if unsafe else character


class Pieces:
    """Decodes token by token, so that each token of a canvas keeps its place.

    `decode` turns ids into text, special tokens into nothing.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._one = cache(lambda token: harmless(decode([token])))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; of the bytes of one character, the first has it all."""
        texts = [self._one(token) for token in ids]
        place = 0
        for undecoded, run in groupby(texts, key=lambda piece: _UNDECODED in piece):
            stop = place + len(list(run))
            if undecoded:
                joined = harmless(self._decode(list(ids[place:stop])))
                if _UNDECODED not in joined:
                    texts[place:stop] = [joined] + [""] * (stop - place - 1)
            place = stop
        return texts


class Fragment(NamedTuple):
    """Part of a line: text without newlines, and the index of the piece that it comes from."""

    piece: int
    text: str


Line = list[Fragment]


class Wrapped(NamedTuple):
    """The lines, and the indices of the pieces that begin a line where no newline made them."""

    lines: list[Line]
    breaks: frozenset[int]


def wrap(pieces: Sequence[str], width: int, earlier: frozenset[int] | None = None) -> Wrapped:
    """Break before words; a newline in a piece ends a line; nothing is wider than `width` cells.

    `earlier` are the breaks of the draft before. Without them lines are filled to seven eighths, so
    that they can grow a little later. A space at which a line is broken is not shown.
    """
    words = _word_widths(pieces)
    limit = width if earlier is not None else max(1, width - width // 8)
    lines: list[Line] = [[]]
    breaks: set[int] = set()
    column = 0
    for index, piece in enumerate(pieces):
        for number, part in enumerate(piece.split("\n")):
            if number:
                lines.append([])
                column = 0
            if not part:
                continue
            begins = part[0] == " " or (index > 0 and pieces[index - 1][-1:] == " ")
            need = words[index] if begins and words[index] <= width else cell_len(part)
            held = earlier is not None and index in earlier and begins and column >= width // 2
            if column and (held or column + need > limit):
                lines.append([])
                breaks.add(index)
                part, column = part.lstrip(" "), 0
            for nth, chunk in enumerate(chop_cells(part, width) if part else ()):
                if nth:
                    lines.append([])
                    column = 0
                lines[-1].append(Fragment(index, chunk))
                column += cell_len(chunk)
    return Wrapped(lines, frozenset(breaks))


def _word_widths(pieces: Sequence[str]) -> list[int]:
    """For each piece, the cells from its start to the next space or newline after it."""
    widths = [0] * len(pieces)
    following = 0
    for index in range(len(pieces) - 1, -1, -1):
        piece = pieces[index]
        head = piece.split("\n")[0]
        ends = "\n" in piece or piece[-1:] == " " != piece
        widths[index] = cell_len(head) + (0 if ends else following)
        # A piece that opens with white space is where the word before it has ended.
        following = 0 if piece[:1].isspace() else widths[index]
    return widths


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
            length = len(self._ids)
            prose = math.ceil((self.carry.cell_len + length * _CELLS_PER_TOKEN) / width)
            most = max(prose, math.ceil(length / _TOKENS_PER_LINE))
            self._rows = max(1, min(height, most))
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


def _usable(width: int) -> int:
    return max(LEAST_WIDTH, width)
