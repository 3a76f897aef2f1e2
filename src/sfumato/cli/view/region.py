"""The last lines of a terminal, which are redrawn in place; finished lines scroll up above.

Rich's live display counts its lines wrongly when a terminal gets narrower and folds them. This
module counts them at the current width. Knows lines, and not what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sfumato.cli.glyphs import STAND_INS, speaks_unicode

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_END_OF_LINE, _REST_OF_SCREEN = "\x1b[K", "\x1b[J"


class Region:
    """A context manager; the cursor is hidden within, and rests below the region."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[Text] = []

    def __enter__(self) -> Region:
        self._write(_HIDE_CURSOR)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(_SHOW_CURSOR)

    def draw(self, lines: Sequence[Text], above: Sequence[Text] = ()) -> None:
        """Replace the region by `lines`, after `above`, which stay for good."""
        up = self._height()
        self._shown = list(lines)
        body = "".join(self._ansi(line) + _END_OF_LINE + "\n" for line in (*above, *lines))
        # In one write, so that the terminal never shows half of it.
        self._write((f"\x1b[{up}A" if up else "") + "\r" + body + _REST_OF_SCREEN)

    def _height(self) -> int:
        """Terminal lines that the region takes at today's width."""
        width = max(1, self._console.width)
        return sum(max(1, -(-line.cell_len // width)) for line in self._shown)

    def _ansi(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        return capture.get()

    def _write(self, text: str) -> None:
        if not speaks_unicode(self._console.file):
            text = text.translate(STAND_INS)
        self._console.file.write(text)
        self._console.file.flush()
