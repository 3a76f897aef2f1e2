from __future__ import annotations

import numpy as np
import pytest
import torch

import sfumato
from sfumato.train import embedded_data, pictures, recipe
from sfumato.train.trainer import Watch
from sfumato.weights.errors import CheckpointError


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(recipe, "TALK_ROWS", 8)
    monkeypatch.setattr(recipe, "DECIDE_STATES", 1)
    monkeypatch.setattr(recipe, "DECIDE_CHATS", 2)
    monkeypatch.setattr(recipe, "FILL_ROWS", 2)
    monkeypatch.setattr(recipe, "SEE_ROWS", 2)
    monkeypatch.setattr(recipe, "DIGITS_ROWS", 2)
    made = pictures.Digits(np.full((2, 8, 8), 9, np.uint8), np.array([4, 7]))
    monkeypatch.setattr(pictures, "digits", lambda: (made, made))


def test_a_short_run_writes_a_checkpoint_that_answers_and_that_later_stages_begin_with(
    tmp_path, small_network
):
    lines, reported = [], []
    recipe.run(
        "embedded",
        tmp_path / "out",
        steps=1,
        report=lines.append,
        progress=lambda *far: reported.append(far),
    )
    assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]  # four stages
    model = sfumato.load(tmp_path / "out")
    assert model.config == recipe.EMBEDDED
    reply = model.generate("Hello!", max_tokens=16, sampler=sfumato.SamplerConfig(max_steps=2))
    assert reply.stats.canvases == 1
    assert any(str(tmp_path / "out") in line for line in lines)
    before = recipe.load_weights(tmp_path / "out").state_dict()
    for stage, stages in ((3, 2), (4, 1)):
        reported, later = [], tmp_path / f"{stage}"
        recipe.run(
            "embedded",
            later,
            steps=1,
            report=lines.append,
            progress=lambda *far: reported.append(far),  # noqa: B023  (called in this turn)
            begin_with=tmp_path / "out",
            stage=stage,
        )
        assert reported == [(done, stages) for done in range(1, stages + 1)]
        assert sfumato.load(later).network.tower is not None
        after = recipe.load_weights(later).state_dict()
        assert before.keys() == after.keys()
        moved = max(float((after[name] - before[name]).abs().max()) for name in before)
        assert (0 < moved < 0.01) == (stage == 3) and (moved == 0) == (stage == 4)


def test_a_short_run_of_masks_writes_a_checkpoint_of_the_other_family(
    tmp_path, monkeypatch, small_network
):
    monkeypatch.setattr(recipe, "MASK_ROWS", 2)
    reported = []
    progress = lambda *far: reported.append(far)  # noqa: E731
    recipe.run("masks", tmp_path / "out", 3, report=lambda line: None, progress=progress)
    assert reported == [(1, 3), (2, 3), (3, 3)]
    model = sfumato.load(tmp_path / "out")
    assert model.config == recipe.MASKS and model.family.name == "bd3lm"
    assert model.generate("Hello!", max_tokens=8).stats.canvases == 1
    first, second = (recipe.train_masks(2, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_packaged_model_of_masks_answers():
    model = sfumato.load("embedded-masks")
    assert model.config == recipe.MASKS and model.sampler_defaults.sampler.threshold == 0.9
    tasks = embedded_data.evaluation_sets(seed=0, count=12)
    for name, least in {"questions": 0.95, "sudoku": 0.7, "chat": 0.7}.items():
        some = tasks[name][:12]
        right = [
            model.generate(messages=task.messages, max_tokens=64, seed=1).text == task.expected
            for task in some
        ]
        assert sum(right) >= least * len(some), name


def test_the_packaged_checkpoint_describes_the_recipes_network():
    assert sfumato.load().config == recipe.EMBEDDED


def test_a_later_stage_needs_a_checkpoint_of_the_recipe(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path / "none")):
        recipe.run("embedded", tmp_path, begin_with=tmp_path / "none")


def test_the_same_seed_gives_the_same_weights(small_network):
    first, second, other = (recipe.train_talk(steps=2, seed=s).state_dict() for s in (5, 5, 6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_lowers_the_loss_and_leaves_layer_scalars_alone(small_network, monkeypatch):
    monkeypatch.setattr("sfumato.train.trainer.WARM_UP", 1)
    monkeypatch.setattr("sfumato.train.trainer.SMOOTH", 0.0)
    lines, reported = [], []
    watch = Watch(lines.append, lambda *far: reported.append(far), every=1)
    network = recipe.train_talk(steps=6, watch=watch)
    assert reported == [(step, 6) for step in range(1, 7)]
    losses = [float(line.split("canvas ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0] - 0.1
    assert all(bool((layer.layer_scalar == 1).all()) for layer in network.layers)


def test_the_rate_warms_up_then_falls_along_one_cosine_and_a_small_second_one():
    rates = [recipe.talk_rate(step, 8700) for step in range(8700)]
    main, last = rates[:8000], rates[8000:]
    for part, peak, within in ((main, recipe.TALK_RATE, 0.01), (last, recipe.LAST_RATE, 0.06)):
        top = part.index(max(part))
        assert 90 <= top <= 100 and part[top] == pytest.approx(peak, rel=within)
        assert part == sorted(part[: top + 1]) + sorted(part[top + 1 :], reverse=True)
        assert part[-1] < 0.021 * peak


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_run_of_few_steps_has_a_rate_and_a_mixture_for_each(steps):
    assert all(recipe.talk_rate(step, steps) > 0 for step in range(steps))
    assert all(recipe.mixture(step, steps) for step in range(steps))


def test_an_unknown_recipe_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"'soup' .*'embedded'"):
        recipe.run("soup", tmp_path)


def test_questions_get_most_of_the_later_steps_and_first_asked_ones_the_last():
    mixtures = [recipe.mixture(step, 8700) for step in range(8700)]
    stages = [recipe.EARLY] * 3360 + [recipe.LATER] * 4640 + [recipe.LAST] * 700
    assert mixtures == stages
    assert recipe.EARLY.sudoku > recipe.LATER.sudoku and recipe.LAST.first_asked > 0
