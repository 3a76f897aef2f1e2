"""Lines of a fixed width from a canvas's tokens, with line breaks that hold still.

A canvas changes many times before it is done. Broken afresh each time, its lines would jump about;
so breaks stay at the tokens where they were as long as the lines fit. Knows no styles and no ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells


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
