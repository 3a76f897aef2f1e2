"""Just enough of a terminal to see what a live display leaves on the screen."""

from __future__ import annotations

import io
import re

_TOKEN = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|([^\x1b])")


class Terminal:
    """Endless height, so that every line that was ever shown can be looked at."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        """Take in what a program writes."""
        for match in _TOKEN.finditer(text):
            number, command, character = match.groups()
            if command == "A":
                self.row -= int(number)
                assert self.row >= 0, "moved above what it had written"
            elif command == "K":
                del self.rows[self.row][self.column :]
            elif command == "J":
                del self.rows[self.row][self.column :], self.rows[self.row + 1 :]
            elif character == "\n":
                self._go(self.row + 1, 0)
            elif character == "\r":
                self.column = 0
            elif character:
                self._put(character)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._go(self.row + 1, 0)
        row = self.rows[self.row]
        row[self.column : self.column + 1] = [character]
        self.column += 1

    def _go(self, row: int, column: int) -> None:
        self.row, self.column = row, column
        while len(self.rows) <= row:
            self.rows.append([])

    def resize(self, width: int) -> None:
        """Fold the lines that are too long now, as terminals do; the cursor keeps its line."""
        folded: list[list[str]] = []
        for number, row in enumerate(self.rows):
            if number == self.row:
                self.row = len(folded)
            folded += [row[i : i + width] for i in range(0, max(1, len(row)), width)]
        self.rows, self.width = folded, width

    @property
    def lines(self) -> list[str]:
        """The screen without the empty lines at its end."""
        lines = ["".join(row).rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class Screen(io.StringIO):
    """A file that is a terminal's screen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.terminal = Terminal(width)

    def write(self, text: str) -> int:
        self.terminal.feed(text)
        return super().write(text)
