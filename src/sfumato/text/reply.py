"""A reply, piece by piece as its text is decoded: its thought, answer and tool calls, and where
stop strings end it, in ids and in text, with work linear in the reply.

Only special tokens are markers: `Tokenizer.pieces` gives each as a `Marker`, and a text that quotes
a marker is text. `ChatMarkers` says which marker has which role. The syntax inside a tool call is
read by calls.py. A stop string is text and is looked for in the answer and in tool calls, not in
thoughts; a caller that means a special token gives it as a `Marker`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Literal

from sfumato.refused import Refused
from sfumato.text.calls import PARSERS, QUOTE, CallSyntaxError, ToolCall, as_written
from sfumato.text.markers import ChatMarkers
from sfumato.text.tokenizer import Detokenizer, Marker, Piece, Tokenizer


class Region(Enum):
    """What a place in a reply is part of."""

    ANSWER = 0
    THOUGHT = 1  # its header included
    CALL = 2
    NOTHING = 3  # after the end of the turn

    def begun_by(
        self, marker: str, markers: ChatMarkers, ignore_ends: bool = False
    ) -> Region | None:
        """The region that a marker in this one begins, in the format of `markers`; None where it
        begins none."""
        if self is Region.NOTHING:
            return None
        if marker in markers.ends and not ignore_ends:
            return Region.NOTHING
        if marker == markers.call_open:
            return Region.CALL
        if self is Region.CALL:
            return Region.ANSWER if marker == markers.call_close else None
        if marker == markers.thought_open:
            return Region.THOUGHT
        return Region.ANSWER if marker == markers.thought_close else None


def common_start(one: Sequence[object], other: Sequence[object]) -> int:
    """How many characters or tokens two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def region_after(ids: Sequence[int], tokenizer: Tokenizer, markers: ChatMarkers) -> Region:
    """Where a reply to a prompt begins: in a thought that the prompt has opened and not closed, or
    in the answer."""
    names = (markers.thought_open, markers.thought_close, markers.turn_open)
    opens, *others = (tokenizer.token_id(name) if name else None for name in names)
    if opens is None:
        return Region.ANSWER
    last = next((token for token in reversed(ids) if token == opens or token in others), None)
    return Region.THOUGHT if last == opens else Region.ANSWER


@dataclass(frozen=True)
class Delta:
    """Text to append to the thought or to the answer."""

    kind: Literal["thought", "answer"]
    text: str


@dataclass(frozen=True)
class ParsedReply:
    """A whole reply.

    Attributes:
        thought: without the white space around it; None where nothing was thought, an empty
            thought block included.
        text: the answer, its white space kept.
        tool_calls: in the order they were written.
        warnings: one line for each tool call that could not be read; its text is in no field.
    """

    thought: str | None
    text: str
    tool_calls: tuple[ToolCall, ...]
    warnings: tuple[str, ...] = ()


class ReplyParser:
    """Feed a reply in pieces, text cut anywhere; the parts do not depend on the cuts.

    Deltas of one kind, joined over all of `feed` and `flush`, equal that field of `finish()`.

    Args:
        markers: of the chat format.
        begins: where the prompt ends: in a thought, or where an answer begins.
        ignore_ends: end markers end nothing; they are dropped like any other marker.
    """

    def __init__(
        self, markers: ChatMarkers, begins: Region = Region.ANSWER, ignore_ends: bool = False
    ) -> None:
        self._markers = markers
        self._region = begins
        self._ignore_ends = ignore_ends
        # What may still be coming that is no part of the region, and the part of it that was read.
        self._lead = markers.thought_header if begins is Region.THOUGHT else ""
        self._read = ""
        self._held = ""  # the end of the answer, which a call would follow
        self._leads = {
            markers.thought_open: markers.thought_header,
            markers.thought_close: markers.thought_footer,
            markers.call_close: markers.calls.beside,
        }
        self._call: list[str] = []
        self._texts = {"thought": _Text(strip=True), "answer": _Text(strip=False)}
        self._calls: list[ToolCall] = []
        self._warnings: list[str] = []

    def feed(self, pieces: Iterable[Piece]) -> list[Delta | ToolCall]:
        """What the pieces add, in order; a tool call is added when it is complete."""
        out: list[Delta | ToolCall] = []
        for piece in pieces:
            if isinstance(piece, Marker):
                self._on_marker(piece.text, out)
            else:
                self._on_text(piece, out)
        return _joined(out)

    def flush(self) -> list[Delta | ToolCall]:
        """What was held back until more text: call it once, after the last `feed`."""
        out: list[Delta | ToolCall] = []
        self._enter(Region.NOTHING, out)
        return _joined(out)

    def finish(self) -> ParsedReply:
        """The whole reply; includes `flush`."""
        self.flush()
        return ParsedReply(
            self._texts["thought"].joined() or None,
            self._texts["answer"].joined(),
            tuple(self._calls),
            tuple(self._warnings),
        )

    def _on_marker(self, marker: str, out: list[Delta | ToolCall]) -> None:
        begun = self._region.begun_by(marker, self._markers, self._ignore_ends)
        if begun is not None:
            self._enter(begun, out, self._leads.get(marker, ""))
        elif self._region is Region.CALL and marker == self._markers.quote:
            self._call.append(QUOTE)

    def _enter(self, region: Region, out: list[Delta | ToolCall], lead: str = "") -> None:
        """Closes what is open. lead: what may be written first, and is no part of the region."""
        if self._region is Region.CALL:
            self._close_call(out)
        elif self._read.strip() and self._read != self._lead.strip():
            self._add(self._read, out)
        if self._region is Region.ANSWER and region is not Region.CALL:
            self._append("answer", self._held, out)
        self._region, self._lead, self._read, self._held = region, lead, "", ""
        if region is Region.THOUGHT:
            self._texts["thought"].new_paragraph()

    def _close_call(self, out: list[Delta | ToolCall]) -> None:
        text = "".join(self._call)
        self._call = []
        try:
            call = PARSERS[self._markers.calls.arguments](text, self._markers.quote)
        except CallSyntaxError as error:
            text = as_written(text, self._markers.quote)
            shown = text if len(text) <= 80 else text[:80] + "…"
            self._warnings.append(f"a tool call could not be read ({error}): {shown!r}")
        else:
            self._calls.append(call)
            out.append(call)

    def _on_text(self, text: str, out: list[Delta | ToolCall]) -> None:
        if self._region is Region.CALL:
            self._call.append(text)
        elif self._region is not Region.NOTHING:
            self._add(self._after_lead(text) if self._lead else text, out)

    def _add(self, text: str, out: list[Delta | ToolCall]) -> None:
        """Text of a thought or of the answer."""
        if self._region is Region.THOUGHT:
            self._append("thought", text, out)
            return
        text, end = self._held + text, self._markers.calls.beside
        self._held = end if end and text.endswith(end) else ""
        self._append("answer", text.removesuffix(self._held), out)

    def _after_lead(self, text: str) -> str:
        """The part of a text after the lead; of white space, a part of it is one too."""
        read, lead = self._read + text, self._lead
        if read != lead and lead.startswith(read):
            self._read = read
            return ""
        self._lead, self._read = "", ""
        return read[common_start(read, lead) :] if lead.isspace() else read.removeprefix(lead)

    def _append(
        self, kind: Literal["thought", "answer"], text: str, out: list[Delta | ToolCall]
    ) -> None:
        if shown := self._texts[kind].append(text):
            out.append(Delta(kind, shown))


def _joined(parts: list[Delta | ToolCall]) -> list[Delta | ToolCall]:
    """The parts with adjacent deltas of one kind joined."""
    out: list[Delta | ToolCall] = []
    for kind, group in groupby(parts, key=lambda part: getattr(part, "kind", None)):
        if kind is None:
            out += group
        else:
            out.append(Delta(kind, "".join(d.text for d in group if isinstance(d, Delta))))
    return out


class _Text:
    """One field while it is read; `append` returns what may be shown already."""

    def __init__(self, strip: bool) -> None:
        self._strip = strip
        self._parts: list[str] = []
        self._space: list[str] = []  # white space that is shown only if more text follows

    def new_paragraph(self) -> None:
        if self._parts:
            self._space = ["\n\n"]

    def append(self, text: str) -> str:
        if self._strip:
            bare = text.rstrip()
            if not bare:
                self._space.append(text)
                return ""
            space = "".join(self._space)
            self._space = [text[len(bare) :]]
            text = space + bare if self._parts else (space + bare).lstrip()
        if text:
            self._parts.append(text)
        return text

    def joined(self) -> str:
        return "".join(self._parts)


def parse_reply(
    pieces: Iterable[Piece], markers: ChatMarkers, begins: Region = Region.ANSWER
) -> ParsedReply:
    """A whole reply, its special tokens as markers, to its parts; see `ReplyParser`."""
    parser = ReplyParser(markers, begins)
    parser.feed(pieces)
    return parser.finish()


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

    def __init__(
        self,
        stops: StopStrings,
        markers: ChatMarkers,
        ignore_ends: bool = False,
        begins: Region = Region.ANSWER,
    ) -> None:
        self.read = 0
        self.stop_at: int | None = None
        self.stop: str | None = None
        self._stops, self._markers, self._ignore_ends = stops, markers, ignore_ends
        self._region = begins
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
        begins: Region = Region.ANSWER,
    ) -> None:
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer)
        self._search = StopSearch(stops, markers, ignore_ends, begins)
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

    def __init__(
        self,
        stops: StopStrings,
        markers: ChatMarkers,
        ignore_ends: bool = False,
        begins: Region = Region.ANSWER,
    ) -> None:
        self._search = StopSearch(stops, markers, ignore_ends, begins)
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
