from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from sfumato.train import fill_stage, recipe
from sfumato.train.fill_stage import Shares
from sfumato.train.stage import Stage


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(fill_stage, "ROWS", 3)
    monkeypatch.setattr(fill_stage, "QUESTIONS", 1)


@pytest.fixture(scope="module")
def second():
    return recipe.initialised(recipe.EMBEDDED, torch.Generator().manual_seed(0))


def test_the_same_seed_gives_the_same_weights(second):
    networks = [copy.deepcopy(second) for _ in range(3)]
    for network, seed in zip(networks, (5, 5, 6), strict=True):
        fill_stage.train(network, 1, seed, every=99)
    one, two, other = (network.state_dict() for network in networks)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_training_lowers_the_loss_and_reports_it(second, monkeypatch):
    monkeypatch.setattr(fill_stage, "WARM_UP", 1)
    monkeypatch.setattr(fill_stage, "PEAK", 3e-3)  # five steps are to show it
    same = next(fill_stage.rows(0, second.config.canvas_length, 0))  # other rows, another loss
    monkeypatch.setattr(fill_stage, "rows", lambda seed, canvas, part: itertools.repeat(same))
    lines, reported, network = [], [], copy.deepcopy(second)
    fill_stage.train(
        network, 5, report=lines.append, every=1, progress=lambda *far: reported.append(far)
    )
    assert reported == [(step, 5) for step in range(1, 6)]
    losses = [float(line.split(", reply ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0], losses
    assert all(bool((layer.layer_scalar == 1).all()) for layer in network.layers)


def test_what_comes_out_is_the_mean_over_the_steps(second, monkeypatch):
    monkeypatch.setattr(fill_stage, "AVERAGE", 0.75)
    network, after = copy.deepcopy(second), []
    step = Stage.step

    def recorded(stage, *given):
        losses = step(stage, *given)
        after.append(copy.deepcopy(stage.network.state_dict()))
        return losses

    monkeypatch.setattr(Stage, "step", recorded)
    fill_stage.train(network, 2, every=99)
    for name, weights in network.state_dict().items():
        mean = 0.75 * after[0][name] + 0.25 * after[1][name]
        torch.testing.assert_close(weights, mean, rtol=1e-5, atol=1e-7)
    assert not torch.equal(after[0]["norm.weight"], after[1]["norm.weight"])


def test_a_batch_has_rows_of_every_kind():
    rng = np.random.default_rng(0)
    kinds = [fill_stage.draw(rng, 32, Shares()).kind for _ in range(300)]
    for kind, share in Shares()._asdict().items():
        # Of the objects, some are holes between pinned names.
        assert share - 0.1 < kinds.count(kind) / 300 < share + 0.1, kind
    assert "questions" in kinds


def test_the_rate_warms_up_stays_and_falls_to_a_fiftieth():
    rates = [fill_stage.learning_rate(step, fill_stage.STEPS) for step in range(fill_stage.STEPS)]
    top = rates.index(max(rates))
    assert 90 <= top <= 110 and rates[top] == pytest.approx(fill_stage.PEAK, rel=0.02)
    assert rates[fill_stage.STEPS // 2] == rates[top]
    assert rates[-1] < 0.021 * rates[top]
    assert fill_stage.learning_rate(0, 1) > 0
