"""The events of a request: drafts, settled canvases, and one terminal event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.constraints.constrained_reply import ConstraintReport
from sfumato.refused import Refused
from sfumato.tasks.wants import PromptScores

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.decisions.results import DecisionUsage
    from sfumato.diffusion.constraints.questions import Answer

DECIDED = "decided"
"""The outcome of a decision that has answers, among the stop reasons of replies."""

COMPLETED = "completed"
"""The same of a task that its caller has made."""

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


@dataclass(frozen=True)
class Account:
    """What a request took. Times in seconds; what is None never happened."""

    request_id: str
    endpoint: str
    seed: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt, reused from a slot and not encoded again
    requested_tokens: int
    output_tokens: int  # visible ones, thoughts included
    thought_tokens: int
    canvas_tokens: int  # positions of all canvases that settled, those drawn again included
    steps: tuple[int, ...]  # denoising forwards of each canvas
    convergence: tuple[str, ...]
    retries: int  # canvases drawn again because the answer was empty
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
    step_s: tuple[float, ...] = ()  # seconds of each denoising forward, in order
    constraint: ConstraintReport | None = None  # of a reply that had one
    questions: int | None = None  # of a decision, whose denoise_s and step_s are those of reads
    reads: int | None = None  # canvases that were read
    # Tokens of a prediction that stand in the reply, and that do not; None: there was none.
    accepted_prediction: int | None = None
    rejected_prediction: int | None = None

    @property
    def visible_tokens_per_second(self) -> float | None:
        """Over the whole request."""
        return _quotient(self.output_tokens, self.total_s)

    @property
    def canvas_tokens_per_second(self) -> float | None:
        """Positions of canvases over the seconds of denoising."""
        return _quotient(self.canvas_tokens, self.denoise_s)

    @property
    def ms_per_step(self) -> float | None:
        return _quotient(self.denoise_s * 1e3, sum(self.steps))

    @property
    def tokens_per_forward(self) -> float | None:
        return _quotient(self.output_tokens, sum(self.steps))


def _quotient(over: float, under: float) -> float | None:
    return over / under if under else None


@dataclass(frozen=True)
class Finished:
    """The complete reply, or, where the client cancelled it, what had settled until then."""

    reply: Reply
    account: Account
    # Of the prompt's tokens, where the request wants them and the prompt was encoded.
    scores: PromptScores | None = field(default=None, compare=False)
    # The prompt's hidden states as one vector float32 [hidden], where the request wants it.
    vector: Tensor | None = field(default=None, compare=False)

    def texts(self) -> dict[str, Any]:
        """What it says, as plain values, for the audit."""
        return {"answer": self.reply.text, "thought": self.reply.thought}


@dataclass(frozen=True)
class Completed:
    """The outcome of a task that its caller has made."""

    outcome: Any
    account: Account

    def texts(self) -> dict[str, Any]:
        """Nothing: the task's caller knows what the outcome means."""
        return {}


@dataclass(frozen=True)
class Decided:
    """The answers, by the question's id, in the order of the questions: a terminal event."""

    answers: Mapping[str, Answer]
    usage: DecisionUsage
    account: Account

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

    def texts(self) -> dict[str, Any]:
        """What it says, as plain values, for the audit."""
        return {"error": self.message}


Terminal = Finished | Decided | Completed | Failed


def outcome_of(terminal: Terminal) -> str:
    """In one word: a reply's stop reason, "decided", "completed", or the kind of failure."""
    if isinstance(terminal, Failed):
        return terminal.kind
    if isinstance(terminal, Finished):
        return terminal.reply.stop_reason
    return DECIDED if isinstance(terminal, Decided) else COMPLETED


Event = Draft | Settled | Finished | Failed
"""Events of a reply. A decision has its terminal event alone."""
