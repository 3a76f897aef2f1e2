"""A decision: questions about a state that are read rather than written, as the engine takes it.

Loads no torch, so that those who talk to an engine can make one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from sfumato.diffusion.constraints.questions import Question


def new_decision_id() -> str:
    return f"dec-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class DecisionRequest:
    """Questions about one state; `DecisionSettings` says what the fields mean that it has too."""

    state: str
    questions: Mapping[str, Question]  # by id, which never reaches the model
    seed: int = 0
    samples: int | Literal["auto"] = 1
    orders: int = 1
    steps: int = 1
    joint: bool = False
    order: Literal["state", "schema"] = "state"
    label_mass: bool = True
    timeout_s: float | None = None  # from `since`; None: the engine's own
    since: float | None = None  # when the client sent it, by `Engine.now`; None: at its submission
    id: str = field(default_factory=new_decision_id)
    endpoint: str = "api"  # where it came in, for the audit
    user: str | None = None  # whose it is, for the audit
    max_tokens: ClassVar[int] = 0  # nothing is written

    def texts(self) -> dict[str, Any]:
        """What it asks, as plain values, for the audit."""
        questions = {str(name): asdict(each) for name, each in self.questions.items()}
        return {"state": self.state, "questions": questions}
