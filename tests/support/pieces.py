"""Texts with markers to the pieces that replies are parsed from."""

from __future__ import annotations

import re

from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.text.tokenizer import Marker, Piece

MARKERS = DIFFUSION_GEMMA.markers
_SPLIT = re.compile("(" + "|".join(map(re.escape, MARKERS.tokens)) + ")")


def pieces(text: str) -> list[Piece]:
    """The text, each marker in it a special token."""
    return [Marker(p) if p in MARKERS.tokens else p for p in _SPLIT.split(text) if p]
