from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.scripted_decider import ScriptedDecider

from sfumato.cli.rows import outcomes
from sfumato.diffusion.constraints.questions import YesNoQuestion
from sfumato.engine.errors import EngineDead
from sfumato.engine.request import DecisionRequest

QUESTIONS = {"q": YesNoQuestion("Now?")}


def asking(decider: ScriptedDecider) -> Callable[[str], Any]:
    return lambda state: decider.decide(DecisionRequest(state, QUESTIONS))


def test_outcomes_come_in_order_and_a_few_at_a_time() -> None:
    decider = ScriptedDecider()
    states = ["0.1", "too long", "0.3", "slow", "0.5"]
    under_way = []
    seen = []
    for outcome in outcomes(asking(decider), states, 2):
        under_way.append(len(decider.requests) - len(seen))
        seen.append((outcome.row, outcome.result is not None, outcome.error))
    assert seen == [
        ("0.1", True, ""),
        ("too long", False, "state: has no room"),
        ("0.3", True, ""),
        ("slow", False, "timeout: took too long"),
        ("0.5", True, ""),
    ]
    assert max(under_way) == 2


def test_what_is_under_way_is_cancelled_when_it_stops() -> None:
    decider = ScriptedDecider()
    seen = []
    for outcome in outcomes(asking(decider), ["0.1"] * 9, 3, lambda: len(seen) == 2):
        seen.append(outcome)
    assert len(seen) == 2
    assert [each.cancelled for each in decider.pending] == [False, False, True, True]


def test_an_engine_that_is_dead_ends_it() -> None:
    def dies(count: int) -> None:
        if count == 2:
            raise EngineDead("closed")

    with pytest.raises(ValueError, match="the engine has stopped: closed; the same command"):
        list(outcomes(asking(ScriptedDecider(dies)), ["0.1"] * 3, 1))
