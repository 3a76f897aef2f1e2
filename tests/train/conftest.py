"""What tests of recipes share: a small network, and steps that differ by learning alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sfumato.model.model_config import ModelConfig
from sfumato.train import recipe


def _small(config: ModelConfig) -> ModelConfig:
    layers = (
        replace(layer, head_dim=8, rope_pairs=layer.rope_pairs * 8 // layer.head_dim)
        for layer in config.layers
    )
    return replace(config, hidden_size=32, intermediate_size=32, layers=tuple(layers))


@pytest.fixture
def small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the recipe make small networks, of as many layers, and small towers: a step of those it
    makes else takes two to three times as long."""
    monkeypatch.setattr(recipe, "EMBEDDED", replace(_small(recipe.EMBEDDED), expert_size=16))
    monkeypatch.setattr(recipe, "MASKS", _small(recipe.MASKS))
    tower = replace(recipe.TOWER, num_layers=1, text_size=recipe.EMBEDDED.hidden_size)
    monkeypatch.setattr(recipe, "TOWER", tower)


@pytest.fixture
def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each step of a later stage read the same rows and draw the same noise: its losses change
    by learning alone. One part: with the same rows, two would compute the same."""
    streams = recipe._streams

    def same(*how: Any) -> Iterator[Any]:
        *rows, noise = next(streams(*how))
        while True:
            yield (*rows, noise.clone_state())

    monkeypatch.setattr(recipe, "_streams", same)
    monkeypatch.setattr(recipe, "PARTS", 1)
    monkeypatch.setattr("sfumato.train.trainer.WARM_UP", 1)
    monkeypatch.setattr("sfumato.train.trainer.SMOOTH", 0.0)
