"""A 4x4 Sudoku as a grid with lines, while its canvas is denoised and afterwards.

The answer's text is four rows of four digits, one token a character. What is no such text is shown
as any other canvas. Knows nothing of what makes a solution right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from sfumato.cli.view.canvas import HAZE, SETTLED, CanvasDrawing

GIVEN, LINE = "bold cyan", "dim"
WIDTH, HEIGHT = 13, 7
_TOP, _MIDDLE, _BOTTOM = "┌─────┬─────┐", "├─────┼─────┤", "└─────┴─────┘"
_PLACES = [row * 5 + column for row in range(4) for column in range(4)]  # newlines between rows


def grid(cells: Sequence[tuple[str, str]]) -> list[Text]:
    """Sixteen characters with their styles, in lines."""
    lines = [Text(_TOP, LINE)]
    for row in range(4):
        line = Text("│ ", LINE)
        for column, (character, style) in enumerate(cells[4 * row : 4 * row + 4]):
            line.append(character, f"not dim {style}")
            line.append(" │ " if column in (1, 3) else " ", LINE)
        line.rstrip()
        lines += [line, Text(_MIDDLE, LINE)] if row == 1 else [line]
    return [*lines, Text(_BOTTOM, LINE)]


def puzzle(text: str) -> list[Text]:
    """A puzzle as the model reads it, in lines: its given digits distinct."""
    return grid([_given(character) for character in text.replace("\n", "")])


def _given(character: str) -> tuple[str, str]:
    return ("·", HAZE) if character == "." else (character, GIVEN)


class BoardView(CanvasDrawing):
    """The canvas of a reply that solves a puzzle."""

    def __init__(self, decode: Callable[[list[int]], str], text: str) -> None:
        """text: the puzzle's four rows, with '.' where blank."""
        super().__init__(decode)
        self._text = text.replace("\n", "")

    def commit(self, text: str, width: int, thought: str = "") -> list[Text]:
        lines = super().commit(text, width, thought)
        rows = [line.plain for line in (*lines, self.carry)]
        if [len(row) for row in rows] != [4] * 4 or width < WIDTH:
            return lines
        self.carry = Text()
        return grid([(c, self._settled(cell, c)) for cell, c in enumerate("".join(rows))])

    def lines(self, width: int, height: int) -> list[Text]:
        if width < WIDTH or height < HEIGHT:
            return super().lines(width, height)
        if not self._ids:  # before the first draft
            return grid([_given(character) for character in self._text])
        pieces = self._pieces(self._ids)
        shown = [(self._cell(pieces[place]), place) for place in _PLACES]
        return grid(
            [
                (c, GIVEN if c == self._text[cell] else self._style(place))
                for cell, (c, place) in enumerate(shown)
            ]
        )

    def _settled(self, cell: int, character: str) -> str:
        return GIVEN if character == self._text[cell] else SETTLED

    @staticmethod
    def _cell(piece: str) -> str:
        return piece if len(piece) == 1 and piece.isprintable() and piece != " " else "·"
