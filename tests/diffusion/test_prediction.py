"""What canvases begin as where a reply is predicted, and what of the prediction is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sfumato
from sfumato import Draft, Model, SamplerConfig
from sfumato.diffusion.limits import Limits, ReplyPlan
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.prediction import (
    PredictedText,
    Prediction,
    common_length,
    place_of,
    predicted_steps,
)
from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt

TOKENS = st.lists(st.integers(0, 3), max_size=12)
NOISE = Noise(7, 0)


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu", dtype="float32")


def quadratic(one: list[int], other: list[int]) -> int:
    """The textbook's table."""
    row = [0] * (len(other) + 1)
    for token in one:
        before = row
        row = [0]
        for at, each in enumerate(other):
            row.append(before[at] + 1 if each == token else max(before[at + 1], row[at]))
    return row[-1]


@given(one=TOKENS, other=TOKENS)
def test_the_common_length_is_the_tables(one: list[int], other: list[int]) -> None:
    assert common_length(one, other) == quadratic(one, other)


def test_a_prediction_goes_on_behind_the_reply() -> None:
    assert place_of([], [5, 6]) == 0
    assert place_of([5, 6], [5, 6, 7]) == 2
    assert place_of([5, 9, 9, 6, 7], [5, 6, 7, 8]) == 5  # tokens that it has nowhere
    assert place_of([9, *range(10, 20)], range(10, 30)) == 10  # an insertion before them
    assert place_of([*range(12, 22)], range(10, 30)) == 12  # a deletion
    twice = [*range(10, 20), *range(10, 20)]
    assert place_of([*range(10, 20)], twice) == 10


def test_a_canvas_begins_as_the_text_its_end_and_filler() -> None:
    prediction = Prediction((90, 91), (1, 2, 3), (80, 70), 0.0)
    assert prediction.start([], 8, NOISE) == (90, 91, 1, 2, 3, 80, 70, 70)
    assert prediction.start([90, 91, 1, 2], 3, NOISE) == (3, 80, 70)
    assert prediction.start([90, 91, 1, 2, 3, 80], 3, NOISE) is None
    assert Prediction((), (1, 2), (), 0.0).start([], 4, NOISE) == (1, 2, -1, -1)


def test_the_share_of_noise_is_the_strength() -> None:
    ids = tuple(range(1000))
    halves = [Prediction((), ids, (), s).start([], 1000, NOISE) or () for s in (0.25, 0.5, 1.0)]
    counts = [start.count(-1) for start in halves]
    assert 200 < counts[0] < 300 and 450 < counts[1] < 550 and counts[2] == 1000
    assert all(token in (-1, place) for place, token in enumerate(halves[1]))


def test_a_prediction_that_does_not_settle_is_left_out() -> None:
    config = replace(REFERENCE, canvas_length=4)
    plan = ReplyPlan(3, config, Limits(8, (1,)), 5, 2, 64)
    plan = replace(plan, prediction=Prediction((), (7, 8, 9), (1, 0), 0.0))
    make: Any = None  # no canvas is made here
    reply = ReplyTask(plan, Prompt([5] * 3, ()), make)
    canvas = reply.next_canvas()
    assert (canvas.begins, canvas.config.max_steps) == ((7, 8, 9, 1), 6)
    none = torch.zeros(0)
    reply.stepped(Draft(0, 6, none, none, none, 6, none, none))
    assert reply.add_canvas([7, 8, 9, 1], "step_cap") is None
    canvas = reply.next_canvas()
    assert (canvas.begins, canvas.config.max_steps, canvas.noise.attempt) == (None, 48, 1)
    reply.stepped(Draft(0, 3, none, none, none, 48, none, none))
    settled = reply.add_canvas([7, 8, 5, 1], "step_cap")
    assert settled and reply.reason == "eos" and reply.stats.steps == [9]
    outcome = reply.outcome("eos")
    assert outcome.warnings == ("canvas 0: the prediction did not settle and was left out",)
    assert outcome.stats.accepted_prediction == 2
    assert (
        predicted_steps(fixed_steps(40)) == 40 and predicted_steps(SamplerConfig(max_steps=1)) == 1
    )


@pytest.mark.parametrize("how", [{"text": 3}, {"strength": 1.5}, {"strength": True}])
def test_predictions_that_are_none(how: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        PredictedText(**({"text": "x"} | how))


def test_a_right_prediction_takes_fewer_steps_and_a_wrong_one_does_not_survive(
    model: Model,
) -> None:
    ask: Any = {"prompt": "How do you work?", "max_tokens": 64, "seed": 1}
    plain = model.generate(**ask)
    right = model.generate(**ask, prediction=PredictedText(plain.text, 0.2))
    wrong = model.generate(**ask, prediction=PredictedText("The capital is Rome."))
    assert right.text == wrong.text == plain.text and plain.stats.accepted_prediction is None
    assert sum(right.stats.steps) <= sum(plain.stats.steps)
    assert right.stats.accepted_prediction == len(plain.text)
    with pytest.raises(ValueError, match="prediction: must be a PredictedText"):
        model.generate(**ask, prediction="text")


def test_an_edit_begins_as_the_text(model: Model) -> None:
    how: Any = {"max_tokens": 32, "seed": 2, "sampler": sfumato.SamplerConfig(max_steps=3)}
    reply = model.edit("The capital is Paris.", "What is the capital of France?", **how)
    assert reply.stats.accepted_prediction is not None
    again = model.edit("The capital is Paris.", "What is the capital of France?", **how)
    assert again.text == reply.text
    for text, instruction in (("", "x"), ("x", " "), (3, "x")):
        with pytest.raises(ValueError, match="must be text that is not empty"):
            model.edit(text, instruction)  # type: ignore[arg-type]
