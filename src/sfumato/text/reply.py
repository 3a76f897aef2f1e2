"""A reply to its parts: thought, answer and tool calls, piece by piece as the text comes.

Knows the markers of the chat format as text, and nothing of ids: feed it text that was decoded
with `skip_special=False`. The syntax inside a tool call is read by calls.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Literal

from sfumato.text.calls import CallSyntaxError, ToolCall, parse_call

__all__ = ["MARKERS", "Delta", "ParsedReply", "ReplyParser", "ToolCall", "parse_reply"]

MARKERS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", '<|"|>'),
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
)
"""Every marker of the format. Each has one `<`, at its start, and one `>`, at its end."""

_END = {"<turn|>", "<eos>", "<|tool_response>"}
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_LONGEST = max(map(len, MARKERS))
_PREFIXES = {marker[:n] for marker in MARKERS for n in range(1, len(marker))}
_UNFINISHED = tuple(marker[:-1] for marker in MARKERS)
_CHANNEL = "thought\n"


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
        text: the answer, its white space kept, no marker in it.
        tool_calls: in the order they were written.
        warnings: one line for each tool call that could not be read; its text is in no field.
    """

    thought: str | None
    text: str
    tool_calls: tuple[ToolCall, ...]
    warnings: tuple[str, ...] = ()


class _In(Enum):
    ANSWER = 0
    CHANNEL = 1  # just after <|channel>: its name may still be coming
    THOUGHT = 2
    CALL = 3
    NOTHING = 4  # after the end of the turn


class ReplyParser:
    """Feed a reply in pieces, cut anywhere; the parts do not depend on the cuts.

    Deltas of one kind, joined over all of `feed` and `flush`, equal that field of `finish()`.

    Args:
        in_thought: the prompt ended inside a thought channel, so the reply starts with thought.
        ignore_ends: end markers end nothing; they are dropped like any other marker.
    """

    def __init__(self, in_thought: bool = False, ignore_ends: bool = False) -> None:
        self._state = _In.CHANNEL if in_thought else _In.ANSWER
        self._ends = set() if ignore_ends else _END
        self._held = ""  # start of a marker, its rest not seen yet
        self._channel = ""  # what has come of the channel's name
        self._call: list[str] = []
        self._texts = {"thought": _Text(strip=True), "answer": _Text(strip=False)}
        self._calls: list[ToolCall] = []
        self._warnings: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the reply's end marker was seen; whatever follows is ignored."""
        return self._state is _In.NOTHING

    def feed(self, piece: str) -> list[Delta | ToolCall]:
        """What `piece` adds, in order; a tool call comes when it is complete."""
        text = self._held + piece
        out: list[Delta | ToolCall] = []
        at = 0
        for marker in _MARKER.finditer(text):
            self._on_text(text[at : marker.start()], out)
            self._on_marker(marker[0], out)
            at = marker.end()
        cut = text.rfind("<", max(at, len(text) - _LONGEST))
        if cut < 0 or text[cut:] not in _PREFIXES:
            cut = len(text)
        self._on_text(text[at:cut], out)
        self._held = text[cut:]
        return _joined(out)

    def flush(self) -> list[Delta | ToolCall]:
        """What was held back in the hope of more: call it once, after the last `feed`."""
        out: list[Delta | ToolCall] = []
        held, self._held = self._held, ""
        self._on_text(held, out)
        self._leave(out)
        self._state = _In.NOTHING
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
        if self._state is _In.NOTHING:
            return
        if marker in self._ends:
            self._leave(out)
            self._state = _In.NOTHING
        elif marker == "<|tool_call>":
            self._leave(out)
            self._state = _In.CALL
        elif self._state is _In.CALL:
            if marker == "<tool_call|>":
                self._leave(out)
            else:
                self._call.append(marker)
        elif marker == "<|channel>":
            self._leave(out)
            self._texts["thought"].new_paragraph()
            self._state = _In.CHANNEL
        elif marker == "<channel|>":
            self._leave(out)

    def _leave(self, out: list[Delta | ToolCall]) -> None:
        """Close what is open; the answer goes on."""
        if self._state is _In.CHANNEL and self._channel != _CHANNEL.strip():
            self._append("thought", self._channel, out)
        elif self._state is _In.CALL:
            self._close_call(out)
        self._channel = ""
        self._state = _In.ANSWER

    def _close_call(self, out: list[Delta | ToolCall]) -> None:
        text = "".join(self._call)
        self._call = []
        try:
            call = parse_call(text)
        except CallSyntaxError as error:
            shown = text if len(text) <= 80 else text[:80] + "…"
            self._warnings.append(f"a tool call could not be read ({error}): {shown!r}")
        else:
            self._calls.append(call)
            out.append(call)

    def _on_text(self, text: str, out: list[Delta | ToolCall]) -> None:
        if self._state is _In.CHANNEL:
            self._channel += text
            if _CHANNEL.startswith(self._channel):
                if self._channel != _CHANNEL:
                    return
                text = ""
            else:
                text = self._channel.removeprefix(_CHANNEL)
            self._channel = ""
            self._state = _In.THOUGHT
        if self._state is _In.CALL:
            self._call.append(text)
        elif self._state is _In.THOUGHT:
            self._append("thought", text, out)
        elif self._state is _In.ANSWER:
            self._append("answer", text, out)

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
        self._tail = ""

    def new_paragraph(self) -> None:
        if self._parts:
            self._space = ["\n\n"]

    def append(self, text: str) -> str:
        text = self._without_markers(text)
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

    def _without_markers(self, text: str) -> str:
        # Dropping a marker joins what stood around it: "<tu<bos>rn|>" must not become one.
        # Every marker ends in ">", so dropping each ">" that would complete one is enough, and it
        # does not depend on how the text was cut.
        first, *rest = text.split(">")
        kept = [first]
        tail = self._tail + first
        for part in rest:
            end = part if tail.endswith(_UNFINISHED) else ">" + part
            kept.append(end)
            tail = tail[-_LONGEST:] + end
        self._tail = tail[-_LONGEST:]
        return "".join(kept)


def parse_reply(text: str, in_thought: bool = False) -> ParsedReply:
    """`text`, a whole reply with its markers, to its parts; see `ReplyParser`."""
    parser = ReplyParser(in_thought)
    parser.feed(text)
    return parser.finish()
