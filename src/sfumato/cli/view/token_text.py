"""What can be shown of each token of a canvas, and of any text, without harming a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import groupby

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
        self._known: dict[int, str] = {}

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

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = harmless(self._decode([token]))
        return self._known[token]
