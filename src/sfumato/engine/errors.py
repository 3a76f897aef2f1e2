"""What an engine refuses, and how it says so."""

from __future__ import annotations

from sfumato.refused import Refused


class EngineError(Refused, RuntimeError):
    """An engine cannot be made: what it needs, what there is, and which setting to change."""


class QueueFull(RuntimeError):
    """No more requests may wait; the client should come back later."""


class EngineDead(RuntimeError):
    """The engine takes no requests: it was closed, or its thread has died."""


class NotReady(RuntimeError):
    """The engine's failures last, and it takes no requests until a probe of its own works."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s  # until the next probe


REFUSALS = (ValueError, QueueFull, NotReady, EngineDead)  # all that `Engine.submit` promises


class Stops(RuntimeError):
    """Why an engine stops by itself, in words for its clients: a file of the model is shorter than
    when it was opened, or every probe of its own has failed."""
