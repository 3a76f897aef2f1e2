"""How answers are written: one JSON response, and the frames of a stream (`Wire`, lines, server-
sent events). Knows no field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response


def json_response(
    fields: Mapping[str, Any] | Iterator[Any], headers: Mapping[str, str]
) -> Response:
    """To be called in a thread: tokens with alternatives take long to encode. The items of an
    iterator are made and encoded one by one, so that one reply's objects exist at a time."""
    if isinstance(fields, Iterator):
        return Response(_value(fields), headers=dict(headers), media_type="application/json")
    encoded = ",".join(f"{json.dumps(name)}:{_value(value)}" for name, value in fields.items())
    return Response(f"{{{encoded}}}", headers=dict(headers), media_type="application/json")


def _value(value: Any) -> str:
    return f"[{','.join(map(_json, value))}]" if isinstance(value, Iterator) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
