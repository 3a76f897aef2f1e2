"""A client's end of a request: its events, its result, and a way to cancel it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock
from typing import Any

from sfumato.api import Reply
from sfumato.engine.errors import RequestFailed
from sfumato.engine.events import Completed, Decided, Event, Failed, Finished, Terminal
from sfumato.refused import Refused

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]
DecisionSink = Callable[[Decided | Failed], None]


class AnyHandle:
    """Delivers the events of one request, and nothing after the terminal one."""

    def __init__(
        self, request_id: str, sink: Callable[[Any], None] | None, wake: Callable[[], None]
    ) -> None:
        """sink: called with each event, in the engine's thread; None keeps them for `events`."""
        self.id = request_id
        self.cancelled = False
        self.terminal: Terminal | None = None
        self._kept: SimpleQueue[Any] | None = None if sink else SimpleQueue()
        self._sink, self._wake = sink, wake
        self._ended, self._lock = Flag(), Lock()

    def cancel(self) -> None:
        """Ends the request before its next step or chunk; it ends in `Finished`, with the stop
        reason "cancelled" and what had settled, or, a decision, in `Failed`. Does nothing once it
        has ended."""
        self.cancelled = True
        self._wake()

    def deliver(
        self, event: Event | Decided | Completed, first: Callable[[], None] | None = None
    ) -> bool:
        """False where the request has ended already, and the event goes nowhere. first: called
        before the client hears of the event, where it does.

        A sink that raises has lost its client: the request is cancelled.
        """
        with self._lock:
            if self.terminal is not None:
                return False
            if isinstance(event, Terminal):
                self.terminal = event
            if first is not None:
                first()
            try:  # within the lock: another thread's terminal event waits until this one is out
                if self._kept is not None:
                    self._kept.put(event)
                elif self._sink is not None:
                    self._sink(event)
            except Exception:
                log.exception("request %s: its sink failed; the request is cancelled", self.id)
                self.cancelled = True
            finally:
                if self.terminal is not None:
                    self._ended.set()
            return True

    def _success(self) -> Finished | Decided | Completed:
        """Waits for the end. Raises RequestFailed where the request failed."""
        self._ended.wait()
        if isinstance(self.terminal, Failed):
            raise RequestFailed(self.terminal)
        assert self.terminal
        return self.terminal


class Handle(AnyHandle):
    """The handle of a request for a reply."""

    def events(self) -> Iterator[Event]:
        """Waits for each event; ends after the terminal one. Only without a sink, and once."""
        if self._kept is None:
            raise Refused("sink", "this request's events go there", "submit without one to iterate")
        while True:
            event: Event = self._kept.get()
            yield event
            if isinstance(event, Terminal):
                return

    def result(self) -> Reply:
        """Waits for the end. Raises RequestFailed where there is no reply."""
        end = self._success()
        assert isinstance(end, Finished)
        return end.reply

    def outcome(self) -> Any:
        """Waits for the end of a task that its caller has made. Raises RequestFailed where it has
        no outcome."""
        end = self._success()
        assert isinstance(end, Completed)
        return end.outcome


class DecisionHandle(AnyHandle):
    """The handle of a decision."""

    def result(self) -> Decided:
        """Waits for the end. Raises RequestFailed where there are no answers."""
        end = self._success()
        assert isinstance(end, Decided)
        return end
