"""Checks that the memory suffices: before an engine loads, and when a larger slot is asked for.

And how many layers of a model fit a card. Knows budgets and predictions; how the need is computed
is `estimate.py`'s, and what is done when memory runs out in a step is `recovery.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.device_memory import Budget, budget, used_memory
from sfumato.engine.memory.estimate import (
    LIBRARIES,
    ModelFootprint,
    Prediction,
    pool_bytes,
    predict,
)
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.placement import shares_host_memory
from sfumato.model.vision.loading import Tower
from sfumato.weights.checkpoint import Checkpoint

Ask = Callable[[torch.device], Budget | None]

MORE_ON_CARD = ", or leave more to the card (--gpu-layers, --experts-on-cpu)"


@dataclass(frozen=True)
class MemoryView:
    """Prediction and budget of an engine, as `state` gives them."""

    prediction: Prediction
    budget: Budget | None  # on the model's device, before the engine had its share
    spare: int | None  # bytes for larger slots; None: the budget is unknown
    baseline: int | None = None  # bytes that the process held before, the weights with it


class MemoryGuard:
    """Keeps an engine within the available memory. Made before its slots are."""

    def __init__(
        self,
        network: Network,
        config: EngineConfig,
        ask: Ask = budget,
    ) -> None:
        """Raises EngineError where the slots and what steps need do not fit beside the weights."""
        self._footprint, self._config, self._ask = ModelFootprint.of_network(network), config, ask
        prediction, available = predict(self._footprint, config), ask(network.device)
        baseline, spare, need = used_memory(network.device), None, prediction.beside_weights
        if shares_host_memory(network.device):
            need += prediction.libraries
        if available is not None:
            what = f"an engine of {config.slots} slots x {config.context:,} tokens"
            spare = check(need, available, config.memory_margin, what)
        self.view = MemoryView(prediction, available, spare, baseline)
        for device in network.placement.devices[1:]:
            self._check_part(ModelFootprint.of_network(network, device))

    def _check_part(self, part: ModelFootprint) -> None:
        """Raises EngineError where another device has too little for its layers' slots."""
        available, prediction = self._ask(part.device), predict(part, self._config)
        if available is not None:
            what = f"the part on {part.device} of an engine of {self._config.slots} slots"
            check(prediction.beside_weights, available, self._config.memory_margin, what)

    def added(self, capacities: Sequence[int]) -> int:
        """Bytes that larger slots of so many positions add, with what steps then take more."""
        footprint, config = self._footprint, self._config
        slots = (pool_bytes(footprint, 1, n) for n in capacities)
        working = predict(footprint, config, larger=max(capacities, default=0)).working
        return sum(slots) + working - self.view.prediction.working

    def lacks(self, capacities: Sequence[int], held: int | None) -> str | None:
        """Why such larger slots, all of them together, do not go beside the rest; None where they
        do. held: bytes that larger slots hold now, for what is left at present to count as well;
        None asks whether they ever can."""
        view = self.view
        if view.spare is None or view.budget is None:
            return None
        need, left = self.added(capacities), view.spare
        now = None if held is None else self._ask(self._footprint.device)
        if held is not None and now is not None:
            # Between steps their buffers count as free, and `held` can be given back.
            margin = int(view.budget.nbytes * self._config.memory_margin)
            left = min(left, now.nbytes - margin - view.prediction.working + held)
        if need <= left:
            return None
        return f"takes {need:,} bytes, and of memory {max(0, left):,} are left"

    def take(self, nbytes: int, what: str) -> None:
        """Counts bytes that stay beside the slots. Raises EngineError where they do not fit."""
        if self.view.spare is not None and nbytes > self.view.spare:
            raise EngineError(
                None,
                f"{what} takes {_size(nbytes)}, and of memory {_size(max(0, self.view.spare))} is "
                "left",
                "lower --slots, --context or --snapshot-memory, or free some memory",
            )
        self.give_back(-nbytes)

    def give_back(self, nbytes: int) -> None:
        """Counts such bytes as free again."""
        if self.view.spare is not None:
            self.view = replace(self.view, spare=self.view.spare + nbytes)


def check(
    need: int,
    budget: Budget,
    margin: float,
    what: str,
    advice: Callable[[int], str] = lambda _: "",
) -> int:
    """The bytes that stay free, the margin aside. Raises EngineError where there are too few.
    advice: what else would help, by the bytes that are lacking."""
    usable = int(budget.nbytes * (1 - margin))
    if need > usable:
        raise EngineError(
            None,
            f"{what} needs {_size(need)}, and of {_size(budget.nbytes)} ({budget.source}) a margin "
            f"of {margin:.0%} leaves {_size(usable)}",
            "lower --slots, --context or --snapshot-memory, or free some "
            f"memory{advice(need - usable)}",
        )
    return usable - need


def _advice(lacking: int, experts: Sequence[int], room: Budget | None) -> str:
    """The option that makes a model fit which is larger by so many bytes; empty where none does.
    experts: of each layer, bytes that could stay on the host, whose memory has `room`."""
    moved = list(accumulate(experts))
    enough = next((n for n, nbytes in enumerate(moved, 1) if nbytes >= lacking), None)
    if not experts or (room is not None and room.nbytes < lacking):
        return ""
    if enough is None or (room is not None and room.nbytes < moved[enough - 1]):
        return ", or leave layers to the host (--gpu-layers auto)"
    return f", or leave experts with the CPU (--experts-on-cpu {enough})"


def check_load(
    footprint: ModelFootprint,
    config: EngineConfig,
    ask: Ask = budget,
    beside: int = 0,
) -> Prediction:
    """What a model that is not loaded yet will take, with its engine. Raises EngineError where
    that does not fit; pages of mapped files are counted, for without them every step reads the
    file again. beside: bytes that other parts of the model take of the same memory."""
    prediction, available = predict(footprint, config), ask(footprint.device)
    if available is not None:
        placement = footprint.placement
        apart = placement is not None and placement.is_mixed
        subject = f"the part of the model on {footprint.device}" if apart else "the model"
        what = f"{subject} ({_size(prediction.weights)}) with {config.slots} slots"
        if beside:
            what += f" and {_size(beside)} of its other parts"

        def advice(lacking: int) -> str:
            if apart and footprint.device.type == "cpu":
                return MORE_ON_CARD
            experts = () if shares_host_memory(footprint.device) else footprint.experts
            return _advice(lacking, experts, ask(torch.device("cpu")))

        need = _need(footprint, prediction) + beside
        check(need, available, config.memory_margin, what, advice)
    return prediction


def lacking(footprint: ModelFootprint, config: EngineConfig, available: Budget) -> int:
    """Bytes that a device lacks for a model that is not loaded yet, with its engine; 0 or less
    where it suffices."""
    usable = int(available.nbytes * (1 - config.memory_margin))
    return _need(footprint, predict(footprint, config)) - usable


def _need(footprint: ModelFootprint, prediction: Prediction) -> int:
    """What a model that is not loaded yet takes of its device's memory."""
    if shares_host_memory(footprint.device):
        return prediction.total
    return prediction.total - prediction.libraries


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


@dataclass(frozen=True)
class Subject:
    """A model that is not loaded yet, with the dtypes that it will have."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    cache_type: str | None = None
    tower: Tower | None = None  # None: it reads no pictures

    def on(self, device: torch.device, placement: Placement) -> ModelFootprint:
        """The part of it that a placement has on a device. Raises ValueError as
        `ModelFootprint.of_checkpoint`."""
        given = self.checkpoint, self.config, device, self.dtype, self.cache_type
        return ModelFootprint.of_checkpoint(*given, placement, self.tower)


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
    available = ask(torch.device("cpu")) if kept and not in_host else None
    if available is not None:
        what = "the part of the model that waits in the host's memory"
        need = kept + LIBRARIES
        check(need, available, engine.memory_margin, what, lambda _: MORE_ON_CARD)


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
