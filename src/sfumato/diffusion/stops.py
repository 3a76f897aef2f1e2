"""Stop strings: where they end a reply, in text and in ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """Ends a reply before whichever of some strings is complete first.

    Not the one that starts first: a reply must not depend on where its canvases happen to end.
    """

    def __init__(
        self,
        stop: str | Sequence[str] | None,
        decode: Callable[[list[int]], str],
        hide: Callable[[str], str] = lambda text: text,
    ) -> None:
        """decode: the text of some ids, markers included; hide: blanks out, keeping its length,
        what of a text stop strings are not looked for in."""
        given = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(given, Sequence) or not all(isinstance(s, str) and s for s in given):
            raise ValueError(f"stop: must be non-empty strings, one or a list, got {stop!r}")
        self.strings = tuple(given)
        self._decode, self._hide = decode, hide

    def _first(self, text: str) -> int | None:
        seen = self._hide(text)
        found = [(at + len(s), at) for s in self.strings if (at := seen.find(s)) >= 0]
        return min(found)[1] if found else None

    def cut(self, text: str) -> str:
        """The text up to the first stop string."""
        return text[: self._first(text)]

    def final(self, text: str) -> str:
        """`cut`, less an end of the text with which a stop string may be beginning."""
        cut = self.cut(text)
        if len(cut) < len(text):
            return cut
        starts = (string[:n] for string in self.strings for n in range(1, len(string)))
        seen = self._hide(text)
        held = max((len(start) for start in starts if seen.endswith(start)), default=0)
        return text[: len(text) - held]

    def kept_ids(self, ids: list[int]) -> int | None:
        """How many ids lie wholly before the first stop string; None where there is none."""
        if not self.strings or (end := self._first(self._decode(ids))) is None:
            return None
        low, high = 0, len(ids)  # decoded length grows with the ids: find the last that fits
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if len(self._decode(ids[:middle])) <= end else (low, middle - 1)
            )
        return low
