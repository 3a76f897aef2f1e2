"""Stop strings: where they end a reply, in ids and in text, with work linear in the reply.

A stop string is text and is looked for in text alone: in the answer and in tool calls, not in
thoughts. A caller that means a special token gives it as a `Marker`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

from sfumato.refused import Refused
from sfumato.text.markers import ChatMarkers
from sfumato.text.reply import Region
from sfumato.text.tokenizer import Detokenizer, Marker, Piece, Tokenizer

Stop = str | Marker | Sequence[str | Marker] | None


class StopStrings:
    """Strings that end a reply. The string that is complete first ends it, not the one that starts
    first: a reply must not depend on where its canvases end."""

    def __init__(self, stop: Stop) -> None:
        """Raises ValueError for what is neither strings nor markers."""
        given = () if stop is None else (stop,) if isinstance(stop, str | Marker) else stop
        if not isinstance(given, Sequence) or not all(
            isinstance(s, Marker) or (isinstance(s, str) and s) for s in given
        ):
            raise Refused("stop", f"must be non-empty strings, one or a list, got {stop!r}")
        self.strings = tuple(s for s in given if isinstance(s, str))
        self.markers = frozenset(s.text for s in given if isinstance(s, Marker))
        self.longest = max(map(len, self.strings), default=0)

    def __bool__(self) -> bool:
        return bool(self.strings or self.markers)


class StopSearch:
    """Looks for stop strings in one reply, piece by piece; reads each piece once.

    Attributes:
        read: characters of text so far, thoughts included, markers not.
        stop_at: how many of them precede the stop string; None until one is complete.
        stop: the stop string; None until one is complete, and of a marker.
    """

    def __init__(self, stops: StopStrings, markers: ChatMarkers, ignore_ends: bool = False) -> None:
        self.read = 0
        self.stop_at: int | None = None
        self.stop: str | None = None
        self._stops, self._markers, self._ignore_ends = stops, markers, ignore_ends
        self._region = Region.ANSWER
        # The end of what was read: a stop string may begin in it. A stop string may span markers
        # that are dropped, but not two regions.
        self._tail = ""

    def feed(self, piece: Piece) -> None:
        """Reads a piece; not to be called after a stop string was found."""
        assert self.stop_at is None
        if isinstance(piece, Marker):
            self._on_marker(piece.text)
            return
        self.read += len(piece)
        if self._searched and self._stops.strings:
            self._scan(piece)

    @property
    def final(self) -> int:
        """How many characters are certainly before any stop string."""
        if self.stop_at is not None:
            return self.stop_at
        starts = (s[:n] for s in self._stops.strings for n in range(1, len(s)))
        return self.read - max((len(s) for s in starts if self._tail.endswith(s)), default=0)

    @property
    def _searched(self) -> bool:
        return self._region in (Region.ANSWER, Region.CALL)

    def _on_marker(self, marker: str) -> None:
        if marker in self._stops.markers and self._searched:
            self.stop_at = self.read
            return
        begun = self._region.begun_by(marker, self._markers, self._ignore_ends)
        if begun is not None:
            self._region, self._tail = begun, ""

    def _scan(self, piece: str) -> None:
        known, text = len(self._tail), self._tail + piece
        ends = []
        for string in self._stops.strings:
            at = text.find(string, max(0, known - len(string) + 1))
            if at >= 0:
                ends.append((at + len(string), at, string))
        if ends:
            _, at, self.stop = min(ends)
            self.stop_at = self.read - len(text) + at
        self._tail = text[max(0, len(text) - self._stops.longest + 1) :]


class StopCut:
    """How many ids of a reply lie wholly before its first stop string; one for each reply.

    It keeps its place in the settled ids, so that each id is decoded twice and not once a canvas.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings,
        markers: ChatMarkers,
        ignore_ends: bool = False,
    ) -> None:
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer)
        self._search = StopSearch(stops, markers, ignore_ends)
        self._ends: list[int] = []  # of each id: where its last character ends, complete or not

    def __call__(self, reply: Sequence[int], added: Sequence[int]) -> int | None:
        """The count for `reply` and `added` together; None where they hold no stop string.

        reply: as at the last call, possibly longer; added: may be other ids in the next call.
        """
        if not self._stops:
            return None
        count = self._read(reply[len(self._ends) :])
        if count is not None:
            return count
        settled, detokenizer, length = copy(self._search), self._detokenizer.copy(), len(self._ends)
        count = self._read(added)
        self._search, self._detokenizer = settled, detokenizer
        del self._ends[length:]
        return count

    def _read(self, ids: Sequence[int]) -> int | None:
        search = self._search
        for token in ids if search.stop_at is None else ():
            for piece in self._detokenizer.pieces([token]):
                if search.stop_at is None:
                    search.feed(piece)
            if search.stop_at is not None:
                break
            self._ends.append(search.read + self._detokenizer.unfinished)
        return None if search.stop_at is None else bisect_right(self._ends, search.stop_at)


class StopGate:
    """Passes on the pieces of one reply up to its first stop string; holds back an end of the text
    that may be the beginning of one."""

    def __init__(self, stops: StopStrings, markers: ChatMarkers, ignore_ends: bool = False) -> None:
        self._search = StopSearch(stops, markers, ignore_ends)
        self._held: deque[Piece] = deque()
        self._passed = 0  # characters

    @property
    def stop(self) -> str | None:
        """The stop string that was found; None where there is none yet, or where it is a marker."""
        return self._search.stop

    def feed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces that can be no part of a stop string."""
        for piece in pieces:
            if self._search.stop_at is not None:
                break
            self._search.feed(piece)
            if isinstance(piece, Marker) and self._search.stop_at is not None:
                break  # the stop itself
            self._held.append(piece)
        return self._pass(self._search.final)

    def flush(self) -> list[Piece]:
        """What was held back and is no stop string; call it after the last `feed`."""
        stop_at = self._search.stop_at
        return self._pass(self._search.read if stop_at is None else stop_at)

    def _pass(self, end: int) -> list[Piece]:
        """The held pieces up to a character, and the markers before it."""
        out: list[Piece] = []
        while self._held:
            piece = self._held.popleft()
            if isinstance(piece, str) and len(piece) > end - self._passed:
                before = piece[: end - self._passed]
                self._held.appendleft(piece[end - self._passed :])
                self._passed = end
                return [*out, before] if before else out
            self._passed += len(piece) if isinstance(piece, str) else 0
            out.append(piece)
        return out
