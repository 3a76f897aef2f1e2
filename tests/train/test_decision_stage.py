from __future__ import annotations

import copy

import pytest
import torch

from sfumato.train import recipe
from sfumato.train.trainer import Trainer, Watch, muon


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(recipe, "DECIDE_STATES", 1)
    monkeypatch.setattr(recipe, "DECIDE_CHATS", 2)
    monkeypatch.setattr(recipe, "QUESTIONS", 1)


@pytest.fixture
def first(small_network):
    return recipe.initialised(recipe.EMBEDDED, torch.Generator().manual_seed(0))


def test_the_same_seed_gives_the_same_weights(first):
    networks = [copy.deepcopy(first) for _ in range(3)]
    for network, seed in zip(networks, (5, 5, 6), strict=True):
        recipe.train_decide(network, 1, seed)
    one, two, other = (network.state_dict() for network in networks)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_training_lowers_the_losses_and_reports_them(first, same_rows):
    lines, reported, network = [], [], copy.deepcopy(first)
    watch = Watch(lines.append, lambda *far: reported.append(far), every=1)
    recipe.train_decide(network, 4, watch=watch)
    assert reported == [(step, 4) for step in range(1, 5)]
    options = [float(line.split("options ")[1].split(",")[0]) for line in lines]
    assert options[-1] < options[0] - 0.005
    assert all(bool((layer.layer_scalar == 1).all()) for layer in network.layers)


def test_muon_trains_the_matrices_and_adamw_the_rest_each_once(first):
    network = copy.deepcopy(first)
    stage = Trainer("it", network, muon(network), 1, Watch())
    trained = [p for each in stage.optimisers for g in each.param_groups for p in g["params"]]
    assert {id(p) for p in trained} == {id(p) for p in stage.learned}
    assert len(trained) == len(stage.learned)
    assert all(p.ndim == 2 for p in stage.optimisers[0].param_groups[0]["params"])


def test_the_rate_warms_up_and_falls_to_a_fiftieth():
    firsts = (0, *(phase.until for phase in recipe.PHASES[:-1]))
    rates = [
        phase.learning_rate(step)
        for phase, first in zip(recipe.PHASES, firsts, strict=True)
        for step in range(first, phase.until)
    ]
    assert len(rates) == recipe.DECIDE_STEPS
    top = rates.index(max(rates))
    assert 90 <= top <= 110 and rates[top] == pytest.approx(2e-3, rel=0.02)
    assert rates[-1] < 0.021 * rates[top]
    (only,) = recipe.phases(1)
    assert only.learning_rate(0) > 0 and only.until == 1
