"""How many layers of a model fit a card, and whether every part of it fits where it is placed.

Knows predictions and budgets; what a placement is, is `model/layer_devices.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.device_memory import Budget, budget
from sfumato.engine.memory.footprint import ModelFootprint
from sfumato.engine.memory.guard import check_kept, check_load, lacking
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.model_config import ModelConfig
from sfumato.model.placement import shares_host_memory
from sfumato.weights.checkpoint import Checkpoint

Ask = Callable[[torch.device], Budget | None]


@dataclass(frozen=True)
class Subject:
    """A model that is not loaded yet, with the dtypes that it will have."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    cache_type: str | None = None

    def on(self, device: torch.device, placement: Placement) -> ModelFootprint:
        """The part of it that a placement has on a device. Raises ValueError as
        `ModelFootprint.of_checkpoint`."""
        given = self.checkpoint, self.config, device, self.dtype, self.cache_type
        return ModelFootprint.of_checkpoint(*given, placement)


def check_placed(
    subject: Subject, placement: Placement, engine: EngineConfig, ask: Ask = budget
) -> None:
    """Raises EngineError, naming the device, where a part does not fit with its engine; the host's
    memory counts once for all parts that are in it, streamed layers with them."""
    parts = [subject.on(device, placement) for device in placement.devices]
    kept = sum(part.kept for part in parts)
    in_host = [part for part in parts if shares_host_memory(part.device)]
    for part in parts:
        others = (other.weights for other in in_host if other is not part)
        check_load(part, engine, ask, kept + sum(others) if part in in_host else 0)
    if kept and not in_host:
        check_kept(kept, engine, ask)


def most_gpu_layers(
    subject: Subject,
    device: torch.device,
    engine: EngineConfig,
    experts_on_cpu: int = 0,
    ask: Ask = budget,
    other_layers: str = "cpu",
) -> int:
    """The largest number of layers that fit a device with an engine of this layout, as predicted;
    all of them where the device's memory is unknown, and 0 where not even the embedding fits, which
    `check_placed` says. other_layers: what becomes of the others. Raises ValueError as
    `make_placement`."""
    layers, available = len(subject.config.layers), ask(device)
    for count in range(layers, 0, -1):
        placement = make_placement(device, layers, experts_on_cpu, count, other_layers=other_layers)
        if available is None or lacking(subject.on(device, placement), engine, available) <= 0:
            return count
    return 0
