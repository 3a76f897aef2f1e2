"""What pictures take of memory, as predicted: the tower, its buffers, and soft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.live_bytes import LiveBytes
from tests.support.seeing_model import seeing_model

import sfumato
from sfumato.engine.engine_config import KEPT_PICTURES, EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.estimate import ModelFootprint, _tower, largest_picture, predict
from sfumato.engine.memory.guard import MemoryGuard, Subject, check_load
from sfumato.media.patches import BUDGETS
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import make_placement
from sfumato.model.loading import config_of
from sfumato.model.vision.loading import open_tower
from sfumato.model.vision.tower import Encoding
from sfumato.train import recipe

CPU = torch.device("cpu")
LAYOUT = EngineConfig(slots=2, context=128, prefill_chunk=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> sfumato.Model:
    return seeing_model(tmp_path_factory.mktemp("sees") / "model")


def test_the_tower_counts_before_and_after_loading(model: sfumato.Model) -> None:
    checkpoint = open_checkpoint(model.path)
    how = checkpoint, config_of(checkpoint), CPU, model.network.dtype
    tower = open_tower(checkpoint, model.config.hidden_size)
    blind, seeing = (ModelFootprint.of_checkpoint(*how, tower=each) for each in (None, tower))
    assert (
        Subject(*how[:2], how[3], tower=tower).on(
            CPU, make_placement(CPU, len(model.config.layers))
        )
        == seeing
    )
    loaded = ModelFootprint.of_network(model.network)
    assert loaded.weights == seeing.weights and loaded.vision == seeing.vision is not None
    assert seeing.weights - blind.weights > 100_000
    with_tower, without = predict(seeing, LAYOUT), predict(blind, LAYOUT)
    assert without.pictures == 0
    rows = LAYOUT.slots + KEPT_PICTURES
    assert with_tower.pictures > rows * largest_picture(model.config, model.network.dtype)
    assert with_tower.prefill > without.prefill  # a chunk has the largest picture whole
    assert with_tower.total - without.total > with_tower.pictures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffers_of_a_layer_are_those_that_it_takes(
    model: sfumato.Model, dtype: torch.dtype, note: Callable[[str], None]
) -> None:
    """Of a picture of the largest size."""
    config = replace(recipe.TOWER, positions=120)
    tower = recipe.new_tower(config, torch.Generator().manual_seed(1)).requires_grad_(False)
    encoding = Encoding(tower.to(dtype), torch.rand(84 * 120, 3 * config.patch**2), 120)
    assert BUDGETS[-1] * config.pool**2 == 84 * 120
    with torch.no_grad(), LiveBytes(*tower.parameters()) as live:
        encoding.advance(1)
    footprint = replace(ModelFootprint.of_network(model.network), vision=config, dtype=dtype)
    predicted = _tower(footprint)
    note(f"a layer of the tower, {dtype}: {live.most:,} bytes, predicted {predicted:,}")
    assert 0.9 * live.most < predicted < 2 * live.most


def test_an_engine_that_cannot_see_for_memory_is_refused(model: sfumato.Model) -> None:
    seeing = ModelFootprint.of_network(model.network)
    need = predict(seeing, LAYOUT).total
    assert check_load(seeing, LAYOUT, lambda device: Budget(int(1.1 * need), "a test"))
    short = Budget(need - predict(seeing, LAYOUT).pictures, "a test")
    with pytest.raises(EngineError, match="needs"):
        check_load(seeing, LAYOUT, lambda device: short)
    beside = Budget(predict(seeing, LAYOUT).beside_weights // 2, "a test")
    with pytest.raises(EngineError, match="an engine of 2 slots"):
        MemoryGuard(model.network, LAYOUT, lambda device: beside)
