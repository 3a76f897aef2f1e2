"""`Dialect`: one HTTP API for replies, as a value that the shared route is given.

A dialect parses a body into the engine's requests and renders replies and events; all else (bodies,
threads, streams, disconnects, statuses) is the route's. A body's class says which fields are
honoured, refused (`Only`) or ignored (`Ignored`). Knows no dialect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sfumato.engine import Account, Finished, Request, Settled
from sfumato.server.http.errors import OPENAI_ERRORS, ApiError, ErrorForm, Wording
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import SSE, Wire
from sfumato.server.schemas.body import Body
from sfumato.server.service import Service

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

    @abstractmethod
    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        """A canvas has settled."""

    @abstractmethod
    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        """A reply has ended: what no frame has yet, and the end."""

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


@dataclass(frozen=True)
class Dialect(Generic[B]):
    """One POST route that generates, and how it speaks."""

    name: str  # the route's, in the API description
    path: str
    tag: str  # its heading in the API description
    help: str
    body_type: type[B]
    parse: Callable[[Service, B], list[Request]]  # in a thread; raises ApiError
    # The body has lost its lists and longer texts: what a reply needs of them the requests have.
    renderer: Callable[[Service, B, Sequence[Request]], Renderer]
    streams: Callable[[B], bool] = lambda body: False
    wire: Wire = SSE
    errors: ErrorForm = OPENAI_ERRORS
    # Seconds after its first text at which a reply ends with what it has; None: it goes on.
    writing_s: Callable[[B], float | None] = lambda body: None
    wording: Wording = field(
        default_factory=dict
    )  # the engine's names of fields, where the body has others
    # The answer to a body that asks for no reply; None where it asks for one.
    at_once: Callable[[Service, B], Frame | None] = lambda service, body: None
    aliases: tuple[str, ...] = ()  # further paths, which the API description leaves out
