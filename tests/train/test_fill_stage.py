from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from sfumato.train import canvas_data, recipe
from sfumato.train.canvas_data import Shares
from sfumato.train.trainer import Trainer, Watch


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(recipe, "FILL_ROWS", 3)
    monkeypatch.setattr(recipe, "QUESTIONS", 1)


@pytest.fixture
def second(small_network):
    return recipe.initialised(recipe.EMBEDDED, torch.Generator().manual_seed(0))


def test_the_same_seed_gives_the_same_weights(second):
    networks = [copy.deepcopy(second) for _ in range(3)]
    for network, seed in zip(networks, (5, 5, 6), strict=True):
        recipe.train_fill(network, 1, seed)
    one, two, other = (network.state_dict() for network in networks)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_training_lowers_the_loss_and_reports_it(second, same_rows, monkeypatch):
    monkeypatch.setattr(recipe, "FILL_RATE", 3e-3)  # four steps are to show it
    lines, reported, network = [], [], copy.deepcopy(second)
    watch = Watch(lines.append, lambda *far: reported.append(far), every=1)
    recipe.train_fill(network, 4, watch=watch)
    assert reported == [(step, 4) for step in range(1, 5)]
    losses = [float(line.split(", reply ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0], losses
    assert all(bool((layer.layer_scalar == 1).all()) for layer in network.layers)


def test_what_comes_out_is_the_mean_over_the_steps(second, monkeypatch):
    monkeypatch.setattr(recipe, "AVERAGE", 0.75)
    network, after = copy.deepcopy(second), []
    step = Trainer.step

    def recorded(trainer, *given):
        losses = step(trainer, *given)
        after.append(copy.deepcopy(trainer.network.state_dict()))
        return losses

    monkeypatch.setattr(Trainer, "step", recorded)
    recipe.train_fill(network, 2)
    for name, weights in network.state_dict().items():
        mean = 0.75 * after[0][name] + 0.25 * after[1][name]
        torch.testing.assert_close(weights, mean, rtol=1e-5, atol=1e-7)
    assert not torch.equal(after[0]["norm.weight"], after[1]["norm.weight"])


def test_a_batch_has_rows_of_every_kind():
    rng = np.random.default_rng(0)
    kinds = [canvas_data.draw(rng, 32, Shares()).kind for _ in range(300)]
    for kind, share in Shares()._asdict().items():
        # Of the objects, some are holes between pinned names.
        assert share - 0.1 < kinds.count(kind) / 300 < share + 0.1, kind
    assert "questions" in kinds


def test_the_rate_warms_up_stays_and_falls_to_a_fiftieth():
    rates = [recipe.fill_rate(step, recipe.FILL_STEPS) for step in range(recipe.FILL_STEPS)]
    top = rates.index(max(rates))
    assert 90 <= top <= 110 and rates[top] == pytest.approx(recipe.FILL_RATE, rel=0.02)
    assert rates[recipe.FILL_STEPS // 2] == rates[top]
    assert rates[-1] < 0.021 * rates[top]
    assert recipe.fill_rate(0, 1) > 0
