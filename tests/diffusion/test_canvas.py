"""A canvas's own state: pinned positions, what a draft carries, what is kept between steps."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import one_row
from tests.support.soft_of import soft_of
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, GivenCanvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    FixedCount,
    LogitBias,
    Never,
    StableAndConfident,
    StepView,
    temperature_at,
)
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.head import VocabularyHead

LENGTH, VOCABULARY = 6, 20
NETWORK: Any = SimpleNamespace(head=VocabularyHead(torch.eye(VOCABULARY), 30.0))


def canvas(pinned: dict[int, int] | None = None, **choices: Any) -> Canvas:
    config = SamplerConfig(canvas_length=LENGTH, **choices).over(REFERENCE)
    return Canvas(config, Noise(4, 2), VOCABULARY, torch.device("cpu"), pinned=pinned)


def sure_of(*tokens: int) -> Tensor:
    """Scores of which each position's token is certain; -1: all equally likely."""
    scores = torch.zeros(len(tokens), VOCABULARY)
    for position, token in enumerate(tokens):
        if token >= 0:
            scores[position, token] = 1e3
    return scores


def advance(row: Canvas, scores: Tensor) -> Any:
    return one_row.advance(row, one_row.score(NETWORK.head, scores, [row])[0])


def test_a_new_canvas_is_its_noise() -> None:
    row = canvas()
    assert torch.equal(row.tokens, Noise(4, 2).tokens(0, LENGTH, VOCABULARY))
    assert (row.step, row.done, row.place) == (0, False, None)


def test_a_step_keeps_what_is_sure_and_renews_the_rest() -> None:
    row = canvas()
    draft = advance(row, sure_of(3, -1, 5, -1, -1, 7))
    assert torch.equal(draft.noise, Noise(4, 2).tokens(0, LENGTH, VOCABULARY))
    assert (draft.canvas, draft.step, draft.max_steps) == (2, 1, 48)
    # Of the three unsure positions, the first in order of entropy still lies within the bound.
    assert draft.accepted[[0, 2, 5]].all() and int(draft.accepted.sum()) == 4
    assert row.tokens[[0, 2, 5]].tolist() == [3, 5, 7]
    renewed = ~draft.accepted
    fresh = Noise(4, 2).tokens(1, LENGTH, VOCABULARY)
    assert torch.equal(row.tokens[renewed], fresh[renewed])
    assert draft.token_ids.tolist() == [3, 0, 5, 0, 0, 7]  # of equals the lowest id
    assert torch.equal(row.history[-1], draft.token_ids)


def test_a_position_can_be_given_up_again() -> None:
    row = canvas(stopping=Never())
    assert advance(row, sure_of(1, 2, 3, 4, 5, 6)).accepted.all()
    draft = advance(row, sure_of(1, -1, 3, -1, 5, 6))
    assert draft.noise is None  # at the first step alone
    assert draft.accepted.tolist().count(False) == 1
    assert row.tokens[0] == 1


def test_pinned_positions_stay() -> None:
    row = canvas(pinned={1: 9, 4: 11}, stopping=Never())
    assert row.begun[[1, 4]].tolist() == row.tokens[[1, 4]].tolist() == [9, 11]
    for scores in (sure_of(3, 3, 3, 3, 3, 3), sure_of(-1, -1, -1, -1, -1, -1)):
        assert row.tokens[[1, 4]].tolist() == [9, 11]
        draft = advance(row, scores)
        assert draft.token_ids[[1, 4]].tolist() == [9, 11]
        assert draft.entropy[[1, 4]].tolist() == [0.0, 0.0]
        assert draft.accepted[[1, 4]].all()
    assert not draft.accepted.all()


def test_a_given_canvas_begins_as_its_tokens_and_its_pins_have_no_soft_embedding() -> None:
    given = GivenCanvas((3, 9, 4, 5, 11, 6), (1, 4))
    given.check(LENGTH, VOCABULARY)
    config = SamplerConfig(canvas_length=LENGTH, stopping=Never()).over(REFERENCE)
    device = torch.device("cpu")
    row = Canvas(config, Noise(4, 2), VOCABULARY, device, (), given.pins, given)
    assert row.tokens.tolist() == row.begun.tolist() == [3, 9, 4, 5, 11, 6]
    assert advance(row, sure_of(3, 3, 3, 3, 3, 3)).token_ids.tolist() == [3, 9, 3, 3, 11, 3]
    assert soft_of(row).any(dim=1).tolist() == [True, False, True, True, False, True]
    opening = canvas(pinned={1: 9}, stopping=Never())
    advance(opening, sure_of(3, 3, 3, 3, 3, 3))
    assert soft_of(opening).any(dim=1).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (GivenCanvas((1,) * 5), "^tokens: the canvas has 6 positions, and 5 tokens were given"),
        (GivenCanvas((1, 2, 3, 4, 5, 20)), r"^tokens: must be token ids, from 0 to 19; got 20"),
        (GivenCanvas(pinned=(1,)), "^pinned: needs the canvas's tokens"),
        (GivenCanvas((1,) * 6, (0, -1)), "^pinned: must be positions of the canvas, from 0 to 5"),
    ],
)
def test_a_given_canvas_is_checked(given: GivenCanvas, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given.check(LENGTH, VOCABULARY)


def test_pinned_positions_do_not_hold_up_the_others() -> None:
    """Whatever the model makes of them, they are neither unsure nor unstable."""
    row = canvas(pinned={0: 9})
    advance(row, sure_of(-1, 2, 3, 4, 5, 6))
    advance(row, sure_of(7, 2, 3, 4, 5, 6))
    assert row.convergence == "converged"


def test_pins_are_accepted_whatever_the_sampler_says() -> None:
    class Nothing:
        def accept(self, view: StepView) -> Tensor:
            assert view.pinned.tolist() == [False, True, False, False, False, False]
            return torch.zeros(LENGTH, dtype=torch.bool)

    row = canvas(pinned={1: 9}, sampler=Nothing())
    assert advance(row, sure_of(1, 1, 1, 1, 1, 1)).accepted.tolist() == [
        False, True, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("pinned", [{-1: 0}, {LENGTH: 0}, {0: -1}, {0: VOCABULARY}])
def test_pins_out_of_range_are_refused(pinned: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"pinned: position .* out of range"):
        canvas(pinned=pinned)


def test_samplers_and_rules_see_what_is_promised() -> None:
    seen: list[StepView] = []

    class Spy:
        history = 2

        def accept(self, view: StepView) -> Tensor:
            seen.append(view)
            return view.stats.entropy < 0.1

        def done(self, view: StepView) -> Tensor:
            assert view is seen[-1]
            return torch.tensor(False)

    row = canvas(sampler=Spy(), stopping=Spy(), max_steps=5)
    went_in = []
    for token in (3, 4, 5):
        went_in.append(row.tokens)
        advance(row, sure_of(*[token] * LENGTH))
    seen = seen[-3:]  # before the first step, every rule is tried once on empty rows
    assert [view.max_steps for view in seen] == [5, 5, 5]
    # Tensors, so that a step can be captured once and replayed.
    assert torch.equal(torch.stack([view.step for view in seen]), torch.tensor([1, 2, 3]))
    assert all(torch.equal(v.tokens, t) for v, t in zip(seen, went_in, strict=True))
    none = [-1] * LENGTH
    assert seen[0].history.tolist() == [none, none]
    assert seen[1].history.tolist() == [none, [3] * LENGTH]
    assert seen[2].history.tolist() == [[3] * LENGTH, [4] * LENGTH]
    assert seen[2].stats.argmax.tolist() == [5] * LENGTH
    assert seen[2].stats.drawn.tolist() == [5] * LENGTH
    assert seen[2].stats.top_ids[:, 0].tolist() == [5] * LENGTH
    assert seen[2].stats.logits is None


@pytest.mark.parametrize(("rows", "max_steps"), [(0, 9), (1, 9), (3, 9), (11, 9), (256, 9)])
def test_the_history_is_of_one_size(rows: int, max_steps: int) -> None:
    class Back(Never):
        history = rows

    row = canvas(stopping=Back(), max_steps=max_steps, sampler=FixedCount())
    while not row.done:
        assert row.history.shape == (max(1, min(rows, max_steps)), LENGTH)
        advance(row, sure_of(*[3] * LENGTH))


@pytest.mark.parametrize("stability", [0, 1, 3, 8, 9, 64])
def test_stability_is_a_count_and_keeps_one_canvas(stability: int) -> None:
    rule = StableAndConfident(stability, confidence=1e-9)
    row = canvas(stopping=rule, max_steps=9, sampler=FixedCount())
    while not row.done:
        assert row.history.shape == (1, LENGTH)
        advance(row, sure_of(*[3] * LENGTH))
    assert row.step == min(stability + 1, 9)
    assert row.convergence == ("converged" if stability < 9 else "step_cap")


def test_a_change_begins_the_count_anew() -> None:
    row = canvas(stopping=StableAndConfident(2, confidence=1e-9), max_steps=20)
    counts = []
    for token in (3, 3, 4, 3, 4, 4, 4):
        advance(row, sure_of(*[token] * LENGTH))
        batch, place = row.place or (None, 0)
        counts.append(int(batch.unchanged[place]))
    assert counts == [0, 1, 0, 0, 0, 1, 2] and row.convergence == "converged"


def test_what_is_drawn_is_what_happens() -> None:
    """At temperature 0, and at pinned positions: the view shows what the canvas will hold."""
    seen: list[StepView] = []

    class All:
        def accept(self, view: StepView) -> Tensor:
            seen.append(view)
            return torch.ones(LENGTH, dtype=torch.bool)

    views: list[StepView] = []  # of the steps, without the trial of a rule before the first
    for temperature in (0.0, 1.0):
        row = canvas(pinned={2: 9}, temperature=temperature, sampler=All())
        advance(row, sure_of(*[-1] * LENGTH))
        assert torch.equal(seen[-1].stats.drawn, row.tokens) and row.tokens[2] == 9
        views.append(seen[-1])
    cold, warm = views
    assert torch.equal(cold.stats.drawn, cold.stats.argmax)
    assert not torch.equal(warm.stats.drawn, warm.stats.argmax)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(value: float) -> None:
    scores = sure_of(*[3] * LENGTH)
    scores[4] *= value  # zeros among them: NaN either way
    with pytest.raises(FloatingPointError, match=r"canvas 2, step 1: .*dtype='bfloat16'"):
        advance(canvas(), scores)


def test_the_coldest_temperature_still_gives_numbers() -> None:
    row = canvas(temperature=1e-38)
    assert advance(row, torch.randn(LENGTH, VOCABULARY)).entropy.isfinite().all()
    assert soft_of(row).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_processors_may_be_why_scores_are_no_numbers(value: float) -> None:
    row = canvas(processors=(LogitBias({3: value}), LogitBias({4: 1.0})))
    with pytest.raises(FloatingPointError, match=r"no logit processor \(LogitBias, LogitBias\)"):
        advance(row, sure_of(*[3] * LENGTH))
    scores = sure_of(*[3] * LENGTH) * float("nan")
    with pytest.raises(FloatingPointError) as error:
        advance(canvas(), scores)
    assert "processor" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.ones(LENGTH), rf"float32 \[{LENGTH}\]"),
        (torch.ones(LENGTH - 1, dtype=torch.bool), rf"bool \[{LENGTH - 1}\]"),
        (torch.ones(1, LENGTH, dtype=torch.bool), rf"bool \[1, {LENGTH}\]"),
        (torch.tensor(True), r"bool \[\]"),
        ([True] * 2, r"\[True, True\], which is no tensor"),
        (None, "None, which is no tensor"),
    ],
)
def test_a_sampler_must_return_a_mask(answer: Any, got: str) -> None:
    class Odd:
        def accept(self, view: StepView) -> Any:
            return answer

    message = rf"^sampler Odd: accept must return bool \[{LENGTH}\], got {got}$"
    with pytest.raises(ValueError, match=message):
        advance(canvas(sampler=Odd()), sure_of(*[3] * LENGTH))


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.ones(LENGTH, dtype=torch.bool), rf"bool \[{LENGTH}\]"),
        (torch.tensor(1.0), r"float32 \[\]"),
        (True, "True, which is no tensor"),
        (None, "None, which is no tensor"),
    ],
)
def test_a_stopping_rule_must_return_one_truth(answer: Any, got: str) -> None:
    class Odd:
        def done(self, view: StepView) -> Any:
            return answer

    message = rf"^stopping rule Odd: done must return bool \[\], got {got}$"
    with pytest.raises(ValueError, match=message):
        advance(canvas(stopping=Odd()), sure_of(*[3] * LENGTH))


@pytest.mark.parametrize(
    "refused_value", [0.0, -1.0, float("nan"), float("inf"), 1e300, "hot", None, True]
)
def test_a_schedule_must_give_a_temperature(refused_value: Any) -> None:
    class Odd:
        def temperature(self, step: int, max_steps: int) -> Any:
            return refused_value

    got = re.escape(repr(refused_value))
    message = rf"^schedule Odd: temperature must return a number .* got {got} at step 1$"
    with pytest.raises(ValueError, match=message):
        canvas(schedule=Odd()).temperature()


def test_a_schedule_that_raises_is_named() -> None:
    class Odd:
        def temperature(self, step: int, max_steps: int) -> float:
            return 1 / (step - 3)

    message = r"^schedule Odd: temperature raised ZeroDivisionError at step 3: "
    with pytest.raises(ValueError, match=message):
        temperature_at(Odd(), 3, 9)
