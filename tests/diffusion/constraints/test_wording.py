"""The text of questions."""

from __future__ import annotations

import pytest

from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.diffusion.constraints.read_template import question_text


@pytest.mark.parametrize(
    ("question", "labels", "text"),
    [
        (YesNoQuestion("Urgent?"), ("yes", "no"), "Question: Urgent?\nyes\nno\nAnswer yes or no."),
        (
            YesNoQuestion(yes="money is moving"),
            ("A", "B"),
            "Question: Does this hold?\nA: yes (money is moving)\nB: no\nAnswer A or B.",
        ),
        (
            YesNoQuestion("Urgent?", yes="money is moving"),
            ("yes", "no"),
            "Question: Urgent?\nyes: money is moving\nno\nAnswer yes or no.",
        ),
        (
            ChoiceQuestion(
                "Team?", (Option("billing", "payments"), Option("tech"), Option("other"))
            ),
            ("A", "B", "C"),
            "Question: Team?\nA: billing (payments)\nB: tech\nC: other\nAnswer with one label.",
        ),
        (
            ScoreQuestion("", ("calm", "annoyed", "furious")),
            ("0", "1", "2"),
            "Question: Which level fits?\n0: calm\n1: annoyed\n2: furious\nAnswer with one number.",
        ),
    ],
)
def test_a_question_lists_its_options_behind_their_labels(
    question: Question, labels: tuple[str, ...], text: str
) -> None:
    assert question_text(question, labels) == text
