"""The arithmetic of answers: System One's formulas, means and spreads."""

from __future__ import annotations

import pytest

from sfumato.diffusion.constraints.questions import (
    ChoiceAnswer,
    ChoiceQuestion,
    Option,
    Sample,
    ScoreAnswer,
    ScoreQuestion,
    YesNoAnswer,
    YesNoQuestion,
    answer_of,
)


def test_the_worked_examples_of_the_wire() -> None:
    assert YesNoAnswer((0.84, 0.16)).probability == 0.84
    choice = ChoiceAnswer((0.9, 0.06, 0.04))
    assert choice.best == 0 and choice.confidence == pytest.approx(0.85)
    score = ScoreAnswer((0.1, 0.6, 0.3))
    assert score.score == pytest.approx(1.2) and score.best == 1
    assert score.confidence == pytest.approx(0.4)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 255])
def test_confidence_is_0_where_all_are_alike_and_1_where_one_is_sure(count: int) -> None:
    alike, sure = (1 / count,) * count, (1.0, *(0.0,) * (count - 1))
    for kind in (ChoiceAnswer, ScoreAnswer):
        assert kind(sure).confidence == 1
        assert kind(alike).confidence == pytest.approx(float(count == 1), abs=1e-9)


def test_means_are_of_probabilities_and_spreads_are_the_largest_differences() -> None:
    def sample(p: float, mass: float, is_label: bool = True) -> Sample:
        return Sample((p, 1 - p), mass, is_label)

    orders = [[sample(0.2, 0.5), sample(0.4, 0.7)], [sample(0.9, 0.9), sample(0.9, 0.9, False)]]
    answer = answer_of(YesNoQuestion("?"), orders)
    assert answer.probabilities == pytest.approx((0.6, 0.4))
    assert answer.label_mass == pytest.approx(0.75) and answer.is_label is False
    assert (answer.samples, answer.orders) == (2, 2)
    assert answer.spread == pytest.approx(0.2) and answer.order_spread == pytest.approx(0.6)
    alone = answer_of(YesNoQuestion("?"), [[Sample((0.3, 0.7), None, None)]])
    assert alone == YesNoAnswer((0.3, 0.7))


def test_one_option_is_sure() -> None:
    choice = ChoiceQuestion("?", (Option("x"),)).answer((1.0,))
    assert choice == ChoiceAnswer((1.0,)) and (choice.label_mass, choice.is_label) == (None, None)
    answer = ScoreQuestion("?", ("only",)).answer((1.0,))
    assert isinstance(answer, ScoreAnswer) and (answer.score, answer.confidence) == (0, 1)
