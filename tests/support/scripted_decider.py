"""An engine that decides by rule: the number in a state is the probability of the first option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sfumato.decisions import DecisionUsage, ModelIdentity
from sfumato.diffusion.constraints.questions import Answer
from sfumato.engine.events import Decided, Failed, RequestFailed
from sfumato.engine.request import DecisionRequest

MODEL = SimpleNamespace(
    path=Path("scripted.gguf"),
    identity=ModelIdentity("scripted.gguf", "ab12", "float32", "int8", ""),
    plan_decision=lambda *_: None,
    packaged=None,
)


class Pending:
    """A request whose answers are there at once."""

    def __init__(self, end: Decided | Failed) -> None:
        self._end, self.cancelled = end, False

    def result(self) -> Decided:
        if isinstance(self._end, Failed):
            raise RequestFailed(self._end)
        return self._end

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedDecider:
    """Keeps the requests; refuses states with "long", fails those with "slow"."""

    def __init__(self, on_request: Callable[[int], None] = lambda count: None) -> None:
        """on_request: called with the number of each request, from 1."""
        self.requests: list[DecisionRequest] = []
        self.pending: list[Pending] = []
        self._on_request = on_request

    def decide(self, request: DecisionRequest) -> Pending:
        self.requests.append(request)
        self._on_request(len(self.requests))
        if "long" in request.state:
            raise ValueError("state: has no room")
        end: Decided | Failed = Failed("timeout", "took too long")
        if "slow" not in request.state:
            share = float((re.search(r"0\.\d+", request.state) or ["0.5"])[0])
            end = Decided(
                {name: _answer(each, share) for name, each in request.questions.items()},
                DecisionUsage(10, 0, 1),
                None,  # type: ignore[arg-type]
            )
        self.pending.append(Pending(end))
        return self.pending[-1]

    @contextmanager
    def running(self, *_: Any) -> Iterator[ScriptedDecider]:
        """In the place of `sfumato.cli.decide.running`."""
        yield self


def _answer(question: Any, share: float) -> Answer:
    others = len(question.options) - 1
    rest = [(1 - share) / others] * others if others else []
    return question.answer((share, *rest), 0.9, True)
