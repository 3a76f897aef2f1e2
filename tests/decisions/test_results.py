from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from sfumato import Score, YesNo
from sfumato.decisions.schema import DecisionUsage, schema_of
from sfumato.diffusion.constraints.questions import ChoiceAnswer, ScoreAnswer, YesNoAnswer

USAGE = DecisionUsage(input_tokens=3, cached_tokens=0, reads=3)
ANSWERS = {
    "urgent": YesNoAnswer((0.84, 0.16), 0.9, True),
    "team": ChoiceAnswer((0.1, 0.9), None, None, 3, 0.2, 2, 0.3),
    "anger": ScoreAnswer((0.1, 0.6, 0.3), 1.0, True),
}
TYPES = {
    "urgent": bool,
    "team": Literal["billing", "tech"],
    "anger": Score("calm", "annoyed", "furious"),
}


class Ticket(BaseModel):
    """A model that is asked as it stands."""

    urgent: bool = Field(description="Reply needed within the hour?", alias="isUrgent")
    team: Literal["billing", "tech"]
    anger: Annotated[int, Score("calm", "annoyed", "furious")]


def test_answers_are_typed_values() -> None:
    decision = schema_of(TYPES).decision(ANSWERS, USAGE)
    assert decision.value == {"urgent": True, "team": "tech", "anger": "annoyed"}
    assert decision["urgent"].probabilities == {True: 0.84, False: 0.16}
    assert decision["urgent"].confidence == pytest.approx(0.68)
    assert (decision["team"].confidence, decision["team"].spread) == (pytest.approx(0.8), 0.2)
    assert decision["anger"].score == pytest.approx(1.2)
    assert decision["anger"].probability == 0.6
    assert decision.usage.reads == 3
    assert list(decision) == ["urgent", "team", "anger"] and len(decision) == 3
    with pytest.raises(KeyError, match="'angry' is none of the questions: urgent, team, anger"):
        decision["angry"]


def test_it_is_readable() -> None:
    decision = schema_of(TYPES).decision(ANSWERS, USAGE)
    assert (
        repr(decision) == "Decision(urgent=True (0.84), team='tech' (0.90), anger='annoyed' (0.60))"
    )
    assert repr(decision["anger"]) == (
        "TypedAnswer('annoyed', probability=0.60, confidence=0.40, score=1.20, label_mass=1.00)"
    )
    assert str(decision).splitlines() == [
        "urgent: yes  (confidence 0.68, label mass 0.90)",
        "  yes   84% ━━━━━━━━━━━━━━━━━",
        "  no    16% ━━━",
        "team: tech  (confidence 0.80, spread 0.20 of 3 samples, order spread 0.30 of 2)",
        "  billing   10% ━━",
        "  tech      90% ━━━━━━━━━━━━━━━━━━",
        "anger: annoyed  (score 1.20, confidence 0.40, label mass 1.00)",
        "  calm      10% ━━",
        "  annoyed   60% ━━━━━━━━━━━━",
        "  furious   30% ━━━━━━",
    ]


def test_a_pydantic_model_is_asked_and_built() -> None:
    schema = schema_of(Ticket)
    assert schema.questions["urgent"].instructions == "Reply needed within the hour?"
    assert schema.questions["team"].instructions == "Team?"
    value = schema.decision(ANSWERS, USAGE).value
    assert value == Ticket(isUrgent=True, team="tech", anger=1)


def test_a_float_on_a_scale_is_the_expected_score() -> None:
    schema = schema_of({"anger": Annotated[float, TYPES["anger"]]})
    assert schema.decision(ANSWERS, USAGE)["anger"].value == pytest.approx(1.2)


class Nested(BaseModel):
    """A model that cannot be asked."""

    ticket: Ticket


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ({}, "must be 1 to 1024, got 0"),
        ({f"q{i}": bool for i in range(1025)}, "got 1025"),
        ({"": bool}, "a name must be a text that is not empty"),
        ({"q": int}, r"questions\.q: int"),
        (Nested, r"Nested\.ticket: a model within a model"),
        ([bool], "must be a mapping of names to types"),
        (YesNo("a"), "must be a mapping of names to types"),
    ],
)
def test_what_cannot_be_asked_is_refused(questions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of(questions)
