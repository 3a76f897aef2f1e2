"""What this program draws with, where an output cannot show it. Knows no terminal and no text."""

from __future__ import annotations

# One cell for one cell, so that nothing that was laid out moves.
STAND_INS = str.maketrans(
    {"·": "-", "━": "#", "╌": ".", "›": ">", "…": ".", "×": "x", "→": ">", "─": "-", "│": "|"}
    | dict.fromkeys("┌┬┐├┼┤└┴┘", "+")
)


def speaks_unicode(stream: object) -> bool:
    """Whether a text stream can encode everything; one without an encoding has no trouble."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def stand_in(error: UnicodeError) -> tuple[str, int]:
    """An error handler for codecs: our own glyphs become ASCII, anything else a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(c if c.isascii() else "?" for c in lost.translate(STAND_INS)), error.end
