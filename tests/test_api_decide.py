"""`Model.decide` on the embedded model: what it takes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, Field

import sfumato
from sfumato import Choice, Model, Score, YesNo
from sfumato.decisions import Calibration, Reading
from sfumato.decisions.calibration import Temperature, tempered, wording
from sfumato.decisions.schema import schema_of
from sfumato.diffusion.causal import log_likelihoods
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import softmax


class Team(Enum):
    BILLING = "billing"
    TECH = "tech"


class Ticket(BaseModel):
    """A ticket, sorted."""

    urgent: bool = Field(description="Is a reply needed within the hour?")
    team: Team


STATE = {"ticket": "Charged twice."}
QUESTIONS: dict[str, Any] = {
    "urgent": bool,
    "team": Literal["billing", "tech"],
    "anger": Score("calm", "annoyed", "furious"),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load()


def test_answers_are_typed_with_probabilities(model: Model) -> None:
    decision = model.decide(STATE, QUESTIONS)
    assert type(decision["urgent"].value) is bool
    assert decision["team"].value in ("billing", "tech")
    assert decision["anger"].value in ("calm", "annoyed", "furious")
    for answer in decision.values():
        assert sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert answer.label_mass is not None and 0 <= answer.label_mass <= 1
    assert decision.usage.reads == 3 and decision.usage.input_tokens > 30
    assert model.decide(STATE, QUESTIONS).value == decision.value


def test_a_pydantic_model_comes_back(model: Model) -> None:
    ticket = model.decide("Charged twice.", Ticket).value
    assert isinstance(ticket, Ticket) and ticket.team in Team


def test_a_question_does_not_move_another(model: Model) -> None:
    alone = model.decide(STATE, {"team": QUESTIONS["team"]})
    assert alone["team"] == model.decide(STATE, QUESTIONS)["team"]


def test_options_of_the_read(model: Model) -> None:
    how: Any = {"samples": 2, "orders": 2, "order": "schema", "steps": 2, "label_mass": False}
    answer = model.decide(STATE, {"team": Choice(["a", "b"], "Which?")}, seed=1, **how)["team"]
    assert (answer.samples, answer.orders, answer.label_mass) == (2, 2, None)
    assert answer.order_spread > 0
    joint = model.decide(STATE, QUESTIONS, joint=True)
    assert joint.usage.reads == 1 and len(joint) == 3


def test_the_causal_mode_answers_too(model: Model) -> None:
    """As a plain forward of the whole prompt has it; the canvas's answer stays as it is."""
    questions = {"team": Choice(["billing", "tech"]), "urgent": YesNo("Now?")}
    plain = model.decide("I love it", questions, seed=5)
    decision = model.decide("I love it", questions, seed=5, verify="abstain")
    for name, answer in decision.items():
        assert replace(answer, undecided=False, other=None) == plain[name]
    assert decision["team"].undecided and not decision["urgent"].undecided
    assert (decision["team"].value, decision["team"].other) == ("tech", "billing")
    assert "undecided: the causal mode answers billing" in str(decision)
    untyped = schema_of(questions).questions
    how = DecisionSettings(seed=5, verify="abstain")
    plan = model.plan_decision("I love it", untyped, how)
    answers = model.read_questions("I love it", untyped, how)
    for read, own in zip(plan.reads, answers.values(), strict=True):
        prompt = torch.tensor([*plan.prefix, *read.ids])
        logs = [
            float(log_likelihoods(model.network, model.network.new_slot(1), line)[-1])
            for line in (torch.cat((prompt, torch.tensor(label))) for label in read.labels)
        ]
        assert own.causal == pytest.approx(softmax(logs), abs=1e-3)


def test_a_calibration_is_applied(model: Model, tmp_path: Path) -> None:
    questions = {"team": QUESTIONS["team"]}
    schema = schema_of(questions)
    made_for = wording(schema.questions["team"], schema.questions, False)
    calibration = Calibration(model.identity, Reading(), {"team": Temperature(2.0, made_for)})
    before = model.decide(STATE, questions)["team"].probabilities
    after = model.decide(STATE, questions, calibration=calibration)["team"].probabilities
    assert tuple(after.values()) == pytest.approx(tempered(tuple(before.values()), 2.0))
    with pytest.raises(ValueError, match="was made with steps = 1, and this has 2"):
        model.decide(STATE, questions, calibration=calibration, steps=2)
    with pytest.raises(FileNotFoundError):
        model.decide(STATE, questions, calibration=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("state", "questions", "options", "message"),
    [
        (3, {"a": bool}, {}, "state: must be a text, a dict or a list"),
        ("x", {"a": str}, {}, "questions.a: str is no question"),
        ("x", {}, {}, "questions: must be 1 to 1024"),
        ("x", {"a": bool}, {"samples": 0}, "samples: must be"),
        ("x", {"a": bool}, {"order": "x"}, "order: must be"),
        ("x", {"a": bool}, {"verify": "report"}, 'verify: must be "abstain"'),
        ("x", {"a": bool}, {"verify": "abstain", "joint": True}, "answers each question by itself"),
        ("x" * 10**6, {"a": bool}, {}, "state: "),
        ("x", {"a": YesNo("y" * 10**6)}, {}, "questions.a: "),
    ],
)
def test_what_cannot_be_done_is_named(
    model: Model, state: Any, questions: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.decide(state, questions, **options)
