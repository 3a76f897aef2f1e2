"""How frames are written on a stream: `Wire`, lines, and server-sent events. Knows no frame's
fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Wire:
    """One way to send frames. An empty text sends nothing."""

    media_type: str
    encode: Callable[[Fields], str]
    keepalive: str = ""  # sent while a stream has no frames for a time
    end: str = ""  # sent after the last frame


# Many clients, httpx's iter_lines among them, end a line at these three also.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def written(frame: Fields) -> str:
    """A frame as JSON in one line, whatever a client takes for the end of a line."""
    text = json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    return text


def line(frame: Fields) -> str:
    """A line of JSON."""
    return written(frame) + "\n"


def event(frame: Fields) -> str:
    """A server-sent event without a name."""
    return f"data: {written(frame)}\n\n"


def named_event(frame: Fields) -> str:
    """A server-sent event that has the name of its frame's type."""
    return f"event: {frame['type']}\n{event(frame)}"


SSE = Wire("text/event-stream", event, keepalive=": waiting\n\n")
