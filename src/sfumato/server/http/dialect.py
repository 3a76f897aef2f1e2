"""Routes as values: `Get`, `Post`, and `Dialect`, one HTTP API for replies; and how answers are
written (`Wire`).

A dialect parses a body into the engine's requests and renders replies and events; all else (bodies,
threads, streams, disconnects, statuses) is the route's. A body's class says which fields are
honoured, refused or ignored. Knows no dialect.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastapi.responses import Response

from sfumato.engine import Account, Finished, Request, Settled
from sfumato.server.http.errors import OPENAI_ERRORS, ApiError, ErrorForm, Wording
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.body import Body
from sfumato.server.service import Service


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


B = TypeVar("B", bound=Body)
Frame = dict[str, Any]
Answer = Mapping[str, Any] | Iterator[Any]
"""One JSON object, or a list whose items are made and encoded one by one."""


class Renderer(ABC):
    """The replies to one HTTP request, by number: as one body, or as the frames of a stream."""

    keeps_settled = False  # whether `body` needs the settled canvases, which hold tensors

    @abstractmethod
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        """The answer without a stream. An iterator in it becomes a list, and its items are made
        and encoded one by one. Called in a thread."""

    def begin(self, number: int) -> Iterable[Frame]:
        """Before a reply's first event."""
        return ()

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        """A canvas has settled."""
        return ()

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        """A reply has ended: what no frame has yet, and the end."""
        return ()

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        """After all replies."""
        return ()

    def failed(self, error: ApiError, body: Frame) -> Iterable[Frame]:
        """Instead of all that would follow; body: as the dialect's `errors` has it."""
        yield body

    def left(self) -> None:
        """The client of a stream has gone before the end; no frame follows."""
        return

    @property
    def watches_s(self) -> float | None:
        """After how long without an event `waiting` may have frames; None: it has none."""
        return None

    def waiting(self) -> Iterable[Frame]:
        """While there is no event. Called in a thread."""
        return ()

    def extra(self, fields: Frame) -> Frame:
        """A frame for the web page alone: `draft` or `settled`, where a body asks for drafts."""
        return fields


@dataclass(frozen=True, kw_only=True)
class Get:
    """One GET route that reads of the server what there is."""

    path: str
    name: str  # in the API description, as the next two
    tag: str
    help: str
    answer: Callable[[Service], Any]
    shape: Any = dict[str, Any]  # of the answer; None: it is a response
    statuses: tuple[int, ...] = ()  # of errors, beside those of any route
    errors: ErrorForm = OPENAI_ERRORS
    has_head: bool = False
    hidden: bool = False  # from the API description


@dataclass(frozen=True, kw_only=True)
class Post(Generic[B]):
    """One POST route. By itself it answers small questions, for which nothing is generated."""

    name: str  # the route's, in the API description
    path: str
    tag: str  # its heading in the API description
    help: str
    body_type: type[B]
    # The answer to a body that asks for no reply; None where it asks for one. In a thread; raises
    # Refused.
    at_once: Callable[[Service, B], Frame | None] = lambda service, body: None
    errors: ErrorForm = OPENAI_ERRORS
    wording: Wording = field(
        default_factory=dict
    )  # the engine's names of fields, where the body has others
    statuses: tuple[int, ...] = ()  # of errors, beside those of any such route
    aliases: tuple[str, ...] = ()  # further paths, which the API description leaves out


@dataclass(frozen=True, kw_only=True)
class Dialect(Post[B]):
    """One POST route that generates, and how it speaks."""

    parse: Callable[[Service, B], list[Request]]  # in a thread; raises Refused
    # The body has lost its lists and longer texts: what a reply needs of them the requests have.
    renderer: Callable[[Service, B, Sequence[Request]], Renderer]
    streams: Callable[[B], bool] = lambda body: False
    wire: Wire = SSE
    # Seconds after its first text at which a reply ends with what it has; None: it goes on.
    writing_s: Callable[[B], float | None] = lambda body: None
