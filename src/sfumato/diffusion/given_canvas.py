"""A canvas that the caller gives: what a reply's first canvas begins as, and what is pinned on it.

With `read_only` the canvas is read and not written: the reply is the argmax of every position once
all steps are done, its end tokens included, and nothing is committed. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.diffusion.checks import is_whole
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class GivenCanvas:
    """tokens: of every position of the first canvas; None: noise. pinned: positions that keep their
    token at every step, and have no soft embedding."""

    tokens: tuple[int, ...] | None = None
    pinned: tuple[int, ...] = ()
    read_only: bool = False

    @property
    def pins(self) -> dict[int, int]:
        """Position → its fixed token."""
        assert self.tokens is not None or not self.pinned
        return {at: self.tokens[at] for at in self.pinned} if self.tokens else {}

    def check(self, length: int, vocab_size: int) -> None:
        """Raises ValueError, naming the field, for what no canvas of `length` positions can be."""
        if self.tokens is not None:
            if len(self.tokens) != length:
                raise Refused(
                    "tokens",
                    f"the canvas has {length} positions, and {len(self.tokens)} tokens were given",
                    "give one for each position, or another canvas length",
                )
            _check_each("tokens", self.tokens, "token ids", vocab_size)
        if self.pinned and self.tokens is None:
            raise Refused("pinned", "needs the canvas's tokens")
        _check_each("pinned", self.pinned, "positions of the canvas", length)


def _check_each(field: str, values: tuple[int, ...], what: str, end: int) -> None:
    for value in values:
        if not (is_whole(value) and 0 <= value < end):
            raise Refused(field, f"must be {what}, from 0 to {end - 1}; got {quoted(value)}")
