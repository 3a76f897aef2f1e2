"""A reply to its parts: thought, answer and tool calls, piece by piece as the text comes.

Only special tokens are markers. They come as `Marker`, from `Tokenizer.pieces`; a text that quotes
a marker is text. Knows no ids. The syntax inside a tool call is read by calls.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Literal

from sfumato.text.calls import QUOTE, CallSyntaxError, ToolCall, as_written, parse_call
from sfumato.text.markers import ChatMarkers
from sfumato.text.tokenizer import Marker, Piece

__all__ = ["Delta", "ParsedReply", "Region", "ReplyParser", "ToolCall", "parse_reply"]


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
        in_thought: the prompt ended inside a thought, so the reply starts with thought.
        ignore_ends: end markers end nothing; they are dropped like any other marker.
    """

    def __init__(
        self, markers: ChatMarkers, in_thought: bool = False, ignore_ends: bool = False
    ) -> None:
        self._markers = markers
        self._region = Region.THOUGHT if in_thought else Region.ANSWER
        self._in_header = in_thought  # the thought's header may still be coming
        self._ignore_ends = ignore_ends
        self._header = ""  # what has come of it
        self._call: list[str] = []
        self._texts = {"thought": _Text(strip=True), "answer": _Text(strip=False)}
        self._calls: list[ToolCall] = []
        self._warnings: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the reply's end marker was seen; whatever follows is ignored."""
        return self._region is Region.NOTHING

    def feed(self, pieces: Iterable[Piece]) -> list[Delta | ToolCall]:
        """What the pieces add, in order; a tool call comes when it is complete."""
        out: list[Delta | ToolCall] = []
        for piece in pieces:
            if isinstance(piece, Marker):
                self._on_marker(piece.text, out)
            else:
                self._on_text(piece, out)
        return _joined(out)

    def flush(self) -> list[Delta | ToolCall]:
        """What was held back in the hope of more: call it once, after the last `feed`."""
        out: list[Delta | ToolCall] = []
        self._enter(Region.NOTHING, out)
        return _joined(out)

    def finish(self) -> ParsedReply:
        """The whole reply; includes `flush`."""
        self.flush()
        return ParsedReply(
            self._texts["thought"].whole() or None,
            self._texts["answer"].whole(),
            tuple(self._calls),
            tuple(self._warnings),
        )

    def _on_marker(self, marker: str, out: list[Delta | ToolCall]) -> None:
        begun = self._region.begun_by(marker, self._markers, self._ignore_ends)
        if begun is not None:
            self._enter(begun, out)
        elif self._region is Region.CALL and marker == self._markers.quote:
            self._call.append(QUOTE)

    def _enter(self, region: Region, out: list[Delta | ToolCall]) -> None:
        """Closes what is open."""
        if self._in_header and self._header != self._markers.thought_header.strip():
            self._append("thought", self._header, out)
        elif self._region is Region.CALL:
            self._close_call(out)
        self._region, self._header = region, ""
        self._in_header = region is Region.THOUGHT
        if self._in_header:
            self._texts["thought"].new_paragraph()

    def _close_call(self, out: list[Delta | ToolCall]) -> None:
        text = "".join(self._call)
        self._call = []
        try:
            call = parse_call(text, self._markers.quote)
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
        elif self._region is Region.ANSWER:
            self._append("answer", text, out)
        elif self._region is Region.THOUGHT:
            self._append("thought", self._after_header(text) if self._in_header else text, out)

    def _after_header(self, text: str) -> str:
        """What of a text comes after the thought's header."""
        read, header = self._header + text, self._markers.thought_header
        if read != header and header.startswith(read):
            self._header = read
            return ""
        self._in_header, self._header = False, ""
        return read.removeprefix(header)

    def _append(
        self, kind: Literal["thought", "answer"], text: str, out: list[Delta | ToolCall]
    ) -> None:
        if shown := self._texts[kind].append(text):
            out.append(Delta(kind, shown))


def _joined(parts: list[Delta | ToolCall]) -> list[Delta | ToolCall]:
    """Neighbouring deltas of one kind made one."""
    out: list[Delta | ToolCall] = []
    for kind, group in groupby(parts, key=lambda part: getattr(part, "kind", None)):
        if kind is None:
            out += group
        else:
            out.append(Delta(kind, "".join(d.text for d in group if isinstance(d, Delta))))
    return out


class _Text:
    """One field as it grows; `append` returns what may be shown already."""

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

    def whole(self) -> str:
        return "".join(self._parts)


def parse_reply(
    pieces: Iterable[Piece], markers: ChatMarkers, in_thought: bool = False
) -> ParsedReply:
    """A whole reply, its special tokens as markers, to its parts; see `ReplyParser`."""
    parser = ReplyParser(markers, in_thought)
    parser.feed(pieces)
    return parser.finish()
