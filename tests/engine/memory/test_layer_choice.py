"""The number of layers that a card takes is the largest that is predicted to fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf

from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.estimate import LIBRARIES, ModelFootprint, predict
from sfumato.engine.memory.guard import Ask, MemoryGuard, Subject, check_placed, most_gpu_layers
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.loading import config_of, load_network
from sfumato.model.streamed_layers import PIECE

CPU, META, SECOND = torch.device("cpu"), torch.device("meta"), torch.device("cpu", 1)
ENGINE = EngineConfig(slots=1, context=64, memory_margin=0.0)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_state(gguf_config()), gguf_config())
    checkpoint = open_checkpoint(path)
    return Subject(checkpoint, config_of(checkpoint), torch.float32)


def budgets(**nbytes: int) -> Ask:
    """Of devices by their names; those that are not named have no limit that is known."""

    def ask(device: torch.device) -> Budget | None:
        name = str(device).replace(":", "_")
        return Budget(nbytes[name], "a test") if name in nbytes else None

    return ask


def needed(subject: Subject, layers: int, experts_on_cpu: int = 0) -> int:
    placement = make_placement(META, len(subject.config.layers), experts_on_cpu, layers)
    prediction = predict(subject.on(META, placement), ENGINE)
    return prediction.total - prediction.libraries


def test_as_many_as_fit_to_the_byte(subject: Subject) -> None:
    layers = len(subject.config.layers)
    needs = [needed(subject, count) for count in range(1, layers + 1)]
    assert needs == sorted(set(needs)) and len(needs) > 1
    for count, need in enumerate(needs, 1):
        assert most_gpu_layers(subject, META, ENGINE, ask=budgets(meta=need)) == count
        assert most_gpu_layers(subject, META, ENGINE, ask=budgets(meta=need - 1)) == count - 1
    assert most_gpu_layers(subject, META, ENGINE, ask=budgets()) == layers
    tight = budgets(meta=needed(subject, layers, layers))
    assert most_gpu_layers(subject, META, ENGINE, layers, tight) == layers
    assert most_gpu_layers(subject, META, ENGINE, 0, tight) < layers


def test_every_device_is_checked(subject: Subject) -> None:
    placement = make_placement(META, len(subject.config.layers), gpu_layers=1)
    need = predict(subject.on(CPU, placement), ENGINE)
    check_placed(subject, placement, ENGINE, budgets(cpu=need.total))
    with pytest.raises(EngineError, match="the part of the model on cpu"):
        check_placed(subject, placement, ENGINE, budgets(cpu=need.total - 1))
    with pytest.raises(EngineError, match=r"the part of the model on meta .*--gpu-layers auto"):
        check_placed(subject, placement, ENGINE, budgets(meta=1000))


def test_an_engine_checks_the_slots_of_other_devices(subject: Subject) -> None:
    count = len(subject.config.layers)
    placement = Placement(CPU, (SECOND,) * count, (SECOND,) * count)
    network = load_network(subject.checkpoint, CPU, torch.float32, placement=placement)
    MemoryGuard(network, ENGINE, budgets(cpu_1=10**9))
    with pytest.raises(EngineError, match=re.escape("the part on cpu:1 of an engine of 1 slots")):
        MemoryGuard(network, ENGINE, budgets(cpu_1=1000))


def streamed(subject: Subject, count: int, experts_on_cpu: int = 0) -> Placement:
    layers = len(subject.config.layers)
    return make_placement(META, layers, experts_on_cpu, count, other_layers="stream")


def test_streamed_layers_take_two_buffers(subject: Subject) -> None:
    own = (CPU,) * len(subject.config.layers)
    placements = [Placement(CPU, own, own, tuple(range(n))) for n in range(len(own) + 1)]
    parts = [subject.on(CPU, placement) for placement in placements]
    assert parts[2].weights > parts[3].weights and parts[0].kept == 0
    for placement, part in zip(placements, parts, strict=True):
        network = load_network(subject.checkpoint, CPU, torch.float32, placement=placement)
        loaded = ModelFootprint.of_network(network)
        assert (loaded.weights, loaded.config) == (part.weights, subject.config)
        kept = sum(streams.nbytes for streams in network.transformer.streams)
        assert part.kept - PIECE < kept <= part.kept


def test_how_many_layers_fit_beside_the_buffers(subject: Subject) -> None:
    layers = len(subject.config.layers)
    needs = []
    for count in range(layers + 1):
        prediction = predict(subject.on(META, streamed(subject, count)), ENGINE)
        needs.append(prediction.total - prediction.libraries)
    assert needs[0] < needs[1] >= needs[layers]  # two buffers hold two layers, and one more is left
    for nbytes, count in ((needs[layers], layers), (needs[layers] - 1, 0)):
        how = {"ask": budgets(meta=nbytes), "other_layers": "stream"}
        assert most_gpu_layers(subject, META, ENGINE, **how) == count


def test_the_host_is_checked_for_what_stays_there(subject: Subject) -> None:
    count = len(subject.config.layers)
    waiting = subject.on(META, streamed(subject, 1)).kept + LIBRARIES
    check_placed(subject, streamed(subject, 1), ENGINE, budgets(cpu=waiting))
    with pytest.raises(EngineError, match=r"waits in the host's memory .* more to the card"):
        check_placed(subject, streamed(subject, 1), ENGINE, budgets(cpu=waiting - 1))
    experts = make_placement(META, count, count)
    need = predict(subject.on(CPU, experts), ENGINE).total
    check_placed(subject, experts, ENGINE, budgets(cpu=need))
    with pytest.raises(EngineError, match=r"the part of the model on cpu .* more to the card"):
        check_placed(subject, experts, ENGINE, budgets(cpu=need - 1))
    both = streamed(subject, 1, experts_on_cpu=1)
    need = predict(subject.on(CPU, both), ENGINE).total + subject.on(META, both).kept
    check_placed(subject, both, ENGINE, budgets(cpu=need))
    with pytest.raises(EngineError, match="of its other parts needs"):
        check_placed(subject, both, ENGINE, budgets(cpu=need - 1))
