from __future__ import annotations

from pathlib import Path

import pytest

from sfumato import YesNo
from sfumato.cli.decide import cells_of, columns_of, label_number, names_beside, row_state
from sfumato.decisions.question_file import QuestionFile, StateTemplate
from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    ScoreQuestion,
    YesNoQuestion,
)

MORE = ("label_mass", "spread", "order_spread", "probabilities")
KINDS = {"urgent": "yes/no", "team": "choice", "anger": "score"}


def test_names_of_columns() -> None:
    plain = names_beside(columns_of(KINDS, []), ["text", "urgent"])
    assert plain == [
        *("urgent_answer", "urgent_probability", "team_answer", "team_confidence"),
        *("anger_answer", "anger_score", "anger_confidence", "error"),
    ]
    more = names_beside(columns_of({"a": "yes/no"}, MORE), [])
    assert more == [
        *("a_answer", "a_probability", "a_label_mass", "a_spread", "a_order_spread"),
        *("a_probabilities", "error"),
    ]


def test_a_column_that_would_be_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="the table has a column 'team_answer' already"):
        names_beside(columns_of(KINDS, []), ["team_answer"])


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two columns would have the name 'a_order_spread'; ren"):
        columns_of({"a": "yes/no", "a_order": "yes/no"}, MORE)


def test_a_row_without_a_decision_has_its_error() -> None:
    columns = columns_of(KINDS, ["probabilities"])
    cells = cells_of(columns, None, "no room")
    assert set(cells) == set(names_beside(columns, []))
    assert {value for name, value in cells.items() if name != "error"} == {None}
    assert cells["error"] == "no room"


def test_labels_are_no_part_of_a_state() -> None:
    file = QuestionFile(Path("q.toml"), {"urgent": YesNo("Now?")}, None)
    assert row_state(file, {"text": "ü", "urgent": "yes"}) == '{"text": "ü"}'
    with pytest.raises(ValueError, match="no state is left"):
        row_state(file, {"urgent": "yes"})
    file = QuestionFile(Path("q.toml"), file.questions, StateTemplate("{text}!"))
    assert row_state(file, {"text": "a", "urgent": "yes"}) == "a!"


TEAM = ChoiceQuestion("", (Option("1"), Option("0"), Option("No")))


@pytest.mark.parametrize(
    ("question", "text", "number"),
    [
        (YesNoQuestion("a"), " YES ", 0),
        (YesNoQuestion("a"), "0", 1),
        (YesNoQuestion("a"), "", None),
        (TEAM, "0", 1),
        (TEAM, "No", 2),
        (ScoreQuestion("", ("calm", "0")), "0", 1),
        (ScoreQuestion("", ("calm", "angry")), "0", 0),
    ],
)
def test_a_label_names_an_option(question: Question, text: str, number: int | None) -> None:
    assert label_number(question, text) == number


@pytest.mark.parametrize(
    ("question", "text"),
    [(YesNoQuestion("a"), "maybe"), (TEAM, "2"), (TEAM, "no"), (ScoreQuestion("", ("a",)), "1")],
)
def test_other_labels_are_refused(question: Question, text: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        label_number(question, text)
