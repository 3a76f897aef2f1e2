"""Texts with markers to the pieces that replies are parsed from."""

from __future__ import annotations

import re

from sfumato.text.reply import MARKERS
from sfumato.text.tokenizer import Marker, Piece

_SPLIT = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")


def pieces(text: str) -> list[Piece]:
    """The text, each marker in it a special token."""
    return [Marker(p) if p in MARKERS else p for p in _SPLIT.split(text) if p]
