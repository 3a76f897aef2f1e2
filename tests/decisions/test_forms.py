from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from sfumato import Choice, Score, YesNo
from sfumato.decisions.schema import form_of
from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    ScoreQuestion,
    YesNoQuestion,
)


class Team(Enum):
    BILLING = "billing"
    TECH = 2


def test_a_type_becomes_a_question() -> None:
    team = (Option("billing"), Option("tech"))
    for annotation, question, values in [
        (bool, YesNoQuestion("Is urgent?"), (True, False)),
        (Literal["billing", "tech"], ChoiceQuestion("Is urgent?", team), ("billing", "tech")),
        (Literal[1, None], ChoiceQuestion("Is urgent?", (Option("1"), Option("none"))), (1, None)),
        (
            Team,
            ChoiceQuestion("Is urgent?", (Option("billing"), Option("TECH"))),
            (Team.BILLING, Team.TECH),
        ),
        (YesNo("Now?", yes="y", no="n"), YesNoQuestion("Now?", "y", "n"), (True, False)),
        (
            Choice({"billing": "payments", "tech": None}, "Which?"),
            ChoiceQuestion("Which?", (Option("billing", "payments"), Option("tech"))),
            ("billing", "tech"),
        ),
        (Score("calm", "angry"), ScoreQuestion("Is urgent?", ("calm", "angry")), ("calm", "angry")),
    ]:
        form = form_of("is_urgent", annotation)
        assert (form.question, form.values) == (question, values)


def test_annotated_says_the_question_or_the_type_of_the_value() -> None:
    scale = Score("calm", "angry", instructions="How?")
    assert form_of("q", Annotated[bool, "Now?"]).question == YesNoQuestion("Now?")
    assert form_of("q", Annotated[str, scale]).values == ("calm", "angry")
    assert form_of("q", Annotated[int, scale]).values == (0, 1)
    assert form_of("q", Annotated[float, scale]).expected
    described = Choice({"billing": "payments", "TECH": "bugs"})
    form = form_of("q", Annotated[Team, described], instructions="Which?")
    assert form.values == (Team.BILLING, Team.TECH)
    assert form.question == ChoiceQuestion("Which?", described.options)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (int, r"questions\.q: int is no question.*Annotated\[int, Score"),
        (Score, r"the class needs its question: Score\("),
        ("Is it late?", r"for a yes/no question write YesNo\('Is it late\?'\)"),
        (["a", "b"], r"for one of several options write Choice\("),
        (str, "answers with one of the options"),
        (bool | None, "write an option of its own"),
        (Literal["a", "a "], None),
        (Literal["1", 1], r"questions\.q\.options: '1' is there twice"),
        (Literal[1, True], "two of 1, True are equal"),
        (Literal["", "a"], "an option is an empty text"),
        (Enum("Empty", []), "Empty has no members"),
        (Score(), r"levels: must be 1 to 255, got 0"),
        (Choice(map(str, range(256))), r"options: must be 1 to 255, got 256"),
        (YesNo(3), "YesNo: instructions must be a text"),  # type: ignore[arg-type]
        (Annotated[bool, "a", "b"], "two instructions"),
        (Annotated[int, YesNo("a")], r"YesNo gives no int; write Annotated\[bool, YesNo"),
        (Annotated[Team, Choice(["billing"])], "Choice gives no Team"),
    ],
)
def test_what_is_no_question_is_refused_by_name(annotation: Any, message: str | None) -> None:
    if message is None:
        assert form_of("q", annotation).values
        return
    with pytest.raises(ValueError, match=message):
        form_of("q", annotation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Choice("ab"), "several names"),
        (lambda: Choice([""]), "not empty"),
        (lambda: Choice({"a": 1}), "description of 'a'"),  # type: ignore[dict-item]
        (lambda: Score("a", ""), "not empty"),
        (lambda: Score("a", "a"), "the same name"),
    ],
)
def test_kinds_refuse_when_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
