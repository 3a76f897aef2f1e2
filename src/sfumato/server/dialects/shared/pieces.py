"""Text in small pieces, as streams send it."""

from __future__ import annotations

import re

# One word, with the space before it; what is very long, or has no spaces, is cut.
_PIECE = re.compile(r"\s?\S{1,24}|\s{1,24}")


def pieces(text: str) -> list[str]:
    """The text cut between words; joined, the pieces are the text."""
    return _PIECE.findall(text)
