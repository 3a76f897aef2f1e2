"""What is wrong with a text from outside: characters that are not valid Unicode; and JSON of too
many values or levels, which are counted before any of them is decoded.

A decoder holds the interpreter's lock from the first byte to the last, and makes an object of 60
bytes or more of a value of two bytes. So the bytes that begin values are counted first, outside of
strings, by NumPy operations on slices, which release the lock. Knows no grammar: where the text is
no JSON, the counts are an upper bound of what a decoder makes before it stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLICE = 1 << 17  # bytes; a slice's arrays take about twenty times that
MOST_DEPTH = 100  # levels of nesting that any request may need

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
# A value is at the beginning, or after one of `[{,:`; brackets nest.
_BEGINS = np.zeros(256, np.bool_)
_BEGINS[list(b"[{,:")] = True
_NESTS = np.zeros(256, np.int8)
_NESTS[list(b"[{")], _NESTS[list(b"]}")] = 1, -1

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


class JsonTooLarge(ValueError):
    """More values or levels than are allowed."""


class JsonTooDeep(JsonTooLarge):
    """More levels than are allowed."""


@dataclass
class Extent:
    """The counts of the part of a text that has been read."""

    values: int = 1  # keys of objects among them; an empty list or object counts twice
    depth: int = 0
    deepest: int = 0
    quoted: bool = False  # the next byte is inside a string
    escaped: bool = False  # the next byte follows a backslash that is not escaped itself

    def add(self, part: Bytes) -> None:
        quotes = part == _QUOTE
        slashes = part == _BACKSLASH
        if self.escaped or slashes.any():
            escaped, self.escaped = _escaped(slashes, self.escaped)
            quotes &= ~escaped
        if not quotes.any():
            if self.quoted:  # a long text
                return
            plain = np.ones(len(part), np.bool_)
        else:
            # True from an opening quote up to, and without, its closing one.
            inside = np.logical_xor.accumulate(quotes)
            plain = inside if self.quoted else ~inside
            self.quoted ^= bool(inside[-1])
        self.values += int(np.count_nonzero(_BEGINS[part] & plain))
        levels = np.cumsum(_NESTS[part] * plain, dtype=np.int32)
        self.deepest = max(self.deepest, self.depth + int(levels.max()))
        self.depth += int(levels[-1])


def _escaped(slashes: Mask, carried: bool) -> tuple[Mask, bool]:
    """Which bytes are escaped: those after an odd number of backslashes in a row; and whether the
    byte after the last one is. carried: the first one is."""
    at = np.arange(len(slashes), dtype=np.int32)
    # The last byte up to here that is no backslash; one carried over is at -1.
    before = np.maximum.accumulate(np.where(slashes, np.int32(-2 if carried else -1), at))
    odd = ((at - before) & 1).astype(np.bool_)
    return np.concatenate((np.array([carried]), odd[:-1])), bool(odd[-1])


def extent(
    data: bytes | bytearray, most_values: int | None = None, most_depth: int = MOST_DEPTH
) -> Extent:
    """The counts of a UTF-8 text. Raises JsonTooLarge where they exceed the limits."""
    counts = Extent()
    view = np.frombuffer(data, np.uint8)
    for start in range(0, len(view), SLICE):
        counts.add(view[start : start + SLICE])
        if counts.deepest > most_depth:
            raise JsonTooDeep(f"is nested too deeply: over {most_depth} levels")
        if most_values is not None and counts.values > most_values:
            raise JsonTooLarge(f"holds more than {most_values:,} values")
    return counts


def values_of(decoded: Any) -> int:
    """The count that `extent` gives of a JSON text, from what was decoded of it: less where a name
    stands twice in an object, of which a decoder keeps the last."""
    count, left = 1, [decoded]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            count += max(1, 2 * len(value))
            left.extend(value.values())
        elif isinstance(value, list):
            count += max(1, len(value))
            left.extend(value)
    return count


def unicode_fault(text: str) -> str | None:
    """What a message can say of `text` that UTF-8 cannot write, and what to do; None if it can.

    Python's texts may hold halves of surrogate pairs: JSON with a cut escape such as `"\\ud83d"`
    makes them, and so does undecodable input under Python's "surrogateescape".
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            "holds a character that is not valid Unicode (lone surrogate "
            f"U+{ord(text[error.start]):04X} at position {error.start}); remove it, or send the "
            "whole character that it is half of"
        )
    return None
