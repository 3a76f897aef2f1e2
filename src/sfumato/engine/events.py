"""The events of a request: drafts, settled canvases, and one terminal event.

A client gets them by a `Handle`, which waits for the result, and cancels the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Draft
from sfumato.engine.errors import EngineDead, NotReady, QueueFull
from sfumato.model.devices import is_out_of_memory
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.wants import PromptScores
from sfumato.tasks.works import Figures

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.decisions.schema import DecisionUsage
    from sfumato.diffusion.constraints.questions import Answer


log = logging.getLogger(__name__)

Result = TypeVar("Result")

FailureKind = Literal[
    "invalid",
    "too_large",
    "queue_full",
    "not_ready",
    "timeout",
    "cancelled",
    "shutdown",
    "memory",
    "internal",
]


@dataclass(frozen=True, kw_only=True)
class Account(Figures):
    """The account of a request: the figures of its task, and of a decision's reads where it has
    questions. Times in seconds; what is None never happened."""

    request_id: str
    endpoint: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, reused from a slot and not encoded again
    queue_s: float  # from submission to a slot
    slot_wait_s: float  # the part of it as the first in the queue
    prefill_s: float
    denoise_s: float
    commit_s: float
    first_draft_s: float | None  # from submission, as the next two
    first_commit_s: float | None
    total_s: float
    slot: int | None
    context: int | None  # positions of the slot
    allocated: bool  # the slot was there already, rather than made for the request
    step_s: tuple[float, ...] = ()  # seconds of each forward that denoised or read, in order
    reads: int | None = None  # canvases that were read


@dataclass(frozen=True)
class Finished:
    """The complete reply, or, where the client cancelled it, what had settled until then."""

    reply: Reply
    account: Account
    # Of the prompt's tokens, where the request wants them and the prompt was encoded.
    scores: PromptScores | None = field(default=None, compare=False)
    # The prompt's hidden states as one vector float32 [hidden], where the request wants it.
    vector: Tensor | None = field(default=None, compare=False)

    @property
    def outcome(self) -> str:
        """In one word, as each terminal event has it: the reply's stop reason."""
        return self.reply.stop_reason

    @property
    def result(self) -> Reply:
        return self.reply

    def texts(self) -> dict[str, Any]:
        """What it says, as plain values, for the audit."""
        return {"answer": self.reply.text, "thought": self.reply.thought}


@dataclass(frozen=True)
class Completed:
    """The outcome of a task that its caller has made."""

    result: Any
    account: Account
    outcome: ClassVar[str] = "completed"

    def texts(self) -> dict[str, Any]:
        """Nothing: the task's caller knows what the outcome means."""
        return {}


@dataclass(frozen=True)
class Decided:
    """The answers, by the question's id, in the order of the questions: a terminal event."""

    answers: Mapping[str, Answer]
    usage: DecisionUsage
    account: Account
    outcome: ClassVar[str] = "decided"

    @property
    def result(self) -> Decided:
        return self

    def texts(self) -> dict[str, Any]:
        """What it says, as plain values, for the audit."""
        answers = self.answers.items()
        return {"probabilities": {name: each.probabilities for name, each in answers}}


@dataclass(frozen=True)
class Failed:
    """There is no reply. The message is for the client: no path and no trace is in it."""

    kind: FailureKind
    message: str
    account: Account | None = None
    refused: Refused | None = field(default=None, compare=False)  # what was refused, if it was

    @property
    def outcome(self) -> str:
        return self.kind

    def texts(self) -> dict[str, Any]:
        """What it says, as plain values, for the audit."""
        return {"error": self.message}


class RequestFailed(RuntimeError):
    """A request that ended in `Failed`."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.kind}: {failed.message}")
        self.failed = failed


Terminal = Finished | Decided | Completed | Failed


Event = Draft | Settled | Finished | Failed
"""Events of a reply. A decision has its terminal event alone."""


_KINDS: dict[type[Exception], FailureKind] = {
    TooLarge: "too_large",
    QueueFull: "queue_full",
    NotReady: "not_ready",
    EngineDead: "shutdown",
    ValueError: "invalid",  # of the request, or of a row's own processors and samplers
    FloatingPointError: "internal",
}
"""The failures whose messages are for clients; the first kind that an error is counts."""


def explain(error: Exception) -> tuple[FailureKind, str]:
    """A kind, and a message that reveals nothing of this machine."""
    for known, kind in _KINDS.items():
        if isinstance(error, known):
            return kind, str(error)
    if is_out_of_memory(error):
        return "memory", "the memory did not suffice for this request; try again or shorten it"
    return "internal", f"an internal error ({type(error).__name__}); the log has more"


def late(since: float | None, limit_s: float | None, now: float) -> str | None:
    """The message for a request that has run for longer than its limit; None before that."""
    if since is None or limit_s is None or now <= since + limit_s:
        return None
    return f"the request took longer than its {limit_s:g} s"


Sink = Callable[[Event], None]
DecisionSink = Callable[[Decided | Failed], None]


def _nowhere(event: Any) -> None:
    """The sink of a request that has ended."""


class Handle(Generic[Result]):
    """A client's end of one request. Delivers its events, and nothing after the terminal one."""

    def __init__(
        self, request_id: str, sink: Callable[[Any], None] | None, wake: Callable[[], None]
    ) -> None:
        """sink: called with each event, in the engine's thread; None keeps them for `events`."""
        self.id = request_id
        self.cancelled = False
        self.terminal: Terminal | None = None
        kept: SimpleQueue[Any] = SimpleQueue()
        self._kept = None if sink else kept
        self._sink, self._wake = sink or kept.put, wake
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
                self._sink(event)
            except Exception:
                log.exception("request %s: its sink failed; the request is cancelled", self.id)
                self.cancelled = True
            finally:
                if self.terminal is not None:
                    # Its owner may hold this handle: in a circle, a request's pictures would stay
                    # until the next full collection.
                    self._sink = _nowhere
                    self._ended.set()
            return True

    def events(self) -> Iterator[Event]:
        """Waits for each event; ends after the terminal one. Only without a sink, and once."""
        if self._kept is None:
            raise Refused("sink", "this request's events go there", "submit without one to iterate")
        while True:
            event: Event = self._kept.get()
            yield event
            if isinstance(event, Terminal):
                return

    def result(self) -> Result:
        """Waits for the end: a reply, a `Decided`, or the outcome of a task that the caller has
        made. Raises RequestFailed where the request failed."""
        self._ended.wait()
        if isinstance(self.terminal, Failed):
            raise RequestFailed(self.terminal)
        assert self.terminal
        return cast("Result", self.terminal.result)
