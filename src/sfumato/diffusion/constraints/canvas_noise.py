"""The random tokens of a read's slots: a function of the request's seed and the read's own tokens.

So a read draws the same noise whatever its question is called, wherever it stands among others, and
whatever else is read with it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Set


class NoiseKey:
    """The source of one prompt's noise."""

    def __init__(self, seed: int, ids: Iterable[int]) -> None:
        """seed: 0..2⁶⁴-1; ids: of the prompt."""
        self._digest = hashlib.sha256(b"read" + seed.to_bytes(8, "little"))
        self._digest.update(_bytes(ids))

    def extended(self, ids: Iterable[int]) -> NoiseKey:
        """The source of a prompt that goes on with these ids."""
        longer = object.__new__(NoiseKey)
        longer._digest = self._digest.copy()
        longer._digest.update(_bytes(ids))
        return longer

    def _words(self, sample: int, step: int, place: int) -> Iterable[int]:
        """Unsigned words of 64 bits, without end."""
        counter = 0
        while True:
            digest = self._digest.copy()
            digest.update(_bytes((-1, sample, step, place, counter)))
            words = digest.digest()
            yield from (int.from_bytes(words[a : a + 8], "little") for a in range(0, 32, 8))
            counter += 1

    def token(self, sample: int, place: int, size: int, banned: Set[int]) -> int:
        """The token, of a vocabulary of `size`, with which one place of a canvas begins: uniform,
        and none of the banned ones."""
        assert len(banned) < size
        drawn = (word * size >> 64 for word in self._words(sample, 0, place))
        return next(token for token in drawn if token not in banned)

    def uniform(self, sample: int, step: int, place: int) -> float:
        """In [0, 1), with 53 random bits: what the token of one place is drawn with after a step,
        which is 1 or more."""
        word = next(iter(self._words(sample, step, place)))
        return float((word >> 11) / 2**53)


def _bytes(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()
