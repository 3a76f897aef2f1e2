"""How frames are written on a stream: `Wire`, and server-sent events. Knows no frame's fields."""

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


def event(frame: Fields) -> str:
    """A server-sent event without a name."""
    return f"data: {json.dumps(frame, ensure_ascii=False, separators=(',', ':'))}\n\n"


def named_event(frame: Fields) -> str:
    """A server-sent event that has the name of its frame's type."""
    return f"event: {frame['type']}\n{event(frame)}"


SSE = Wire("text/event-stream", event, keepalive=": waiting\n\n")
