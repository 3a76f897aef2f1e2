"""How long a reply is written, where its client has a limit: llama-server's `t_max_predict_ms`.

The reply ends with the canvases that have settled until then, as if it had reached its number of
tokens. Editors ask for that, since their users do not wait for the end of a long suggestion. Knows
no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from sfumato.engine import Event, Failed, Finished, Settled


class WritingLimit:
    """Of all replies to one HTTP request. As in llama-server, the time counts from a reply's first
    text, and a reply without a line break goes on. Used in the event loop alone."""

    def __init__(self, seconds: float, cancel: Callable[[int], None]) -> None:
        """cancel: called with the number of a reply whose time is over."""
        self._seconds, self._cancel = seconds, cancel
        self._loop = asyncio.get_running_loop()
        self._begun: dict[int, float] = {}  # when a reply's first canvas settled, by the loop
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._over: set[int] = set()

    def is_over(self, number: int) -> bool:
        return number in self._over

    def watched(self, number: int, event: Event) -> Event:
        """The event; the end of a reply whose time was over says that the reply was cut."""
        if isinstance(event, Settled):
            begun = self._begun.setdefault(number, self._loop.time())
            if "\n" in event.text and number not in self._timers:
                until = begun + self._seconds
                self._timers[number] = self._loop.call_at(until, self._end, number)
        elif isinstance(event, Finished | Failed):
            if number in self._timers:
                self._timers[number].cancel()
            if number not in self._over or isinstance(event, Failed):
                return event
            if event.reply.stop_reason == "cancelled":
                return replace(event, reply=replace(event.reply, stop_reason="max_tokens"))
        return event

    def _end(self, number: int) -> None:
        self._over.add(number)
        self._cancel(number)
