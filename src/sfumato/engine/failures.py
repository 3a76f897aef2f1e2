"""Which failure an exception, or a deadline, is to the client whose request it ends."""

from __future__ import annotations

from sfumato.engine.errors import EngineDead, NotReady, QueueFull
from sfumato.engine.events import FailureKind
from sfumato.model.devices import is_out_of_memory
from sfumato.refused import TooLarge


def explain(error: Exception) -> tuple[FailureKind, str]:
    """A kind, and a message that reveals nothing of this machine."""
    if isinstance(error, TooLarge):
        return "too_large", str(error)
    if isinstance(error, QueueFull):
        return "queue_full", str(error)
    if isinstance(error, NotReady):
        return "not_ready", str(error)
    if isinstance(error, EngineDead):
        return "shutdown", str(error)
    if is_out_of_memory(error):
        return "memory", "the memory did not suffice for this request; try again or shorten it"
    if isinstance(error, ValueError):  # of the request, or of a row's own processors and samplers
        return "invalid", str(error)
    if isinstance(error, FloatingPointError):
        return "internal", str(error)
    return "internal", f"an internal error ({type(error).__name__}); the log has more"


def late(since: float | None, limit_s: float | None, now: float) -> str | None:
    """The message for a request that has run for longer than its limit; None before that."""
    if since is None or limit_s is None or now <= since + limit_s:
        return None
    return f"the request took longer than its {limit_s:g} s"
