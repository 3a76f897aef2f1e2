"""Placement: the options make one value, tensors go where it says, and results do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato import ops
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.estimate import ModelFootprint, predict
from sfumato.engine.memory.guard import check_load
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.loading import config_of, load_network
from sfumato.model.transformer import Experts

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("count", [-1, 4, True, 1.0, "2", 10**30])
@pytest.mark.parametrize("name", ["experts_on_cpu", "gpu_layers"])
def test_a_wrong_number_of_layers_is_refused(name: str, count: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}: .* from 0 to 3"):
        make_placement(META, 3, **{name: count})  # type: ignore[arg-type]


def test_experts_of_the_first_layers_stay_on_the_host() -> None:
    placement = make_placement(META, 3, 2)
    assert placement == Placement(META, (META,) * 3, (CPU, CPU, META)) and placement.is_mixed
    assert placement.of("layers.1.experts.down_proj") == CPU
    assert placement.of("layers.2.experts.down_proj") == META
    assert placement.of("layers.1.router.proj.weight") == META
    assert placement.of("embed_tokens.weight") == META
    assert not make_placement(CPU, 3, 2).is_mixed and not make_placement(META, 3).is_mixed


def test_the_last_layers_are_on_the_card() -> None:
    placement = make_placement(META, 3, gpu_layers=2)
    assert placement == Placement(META, (CPU, META, META), (CPU, META, META))
    assert placement.of("layers.0.self_attn.q_proj.weight") == CPU
    assert placement.of("layers.0.experts.down_proj") == CPU
    assert placement.of("layers.1.mlp.up_proj.weight") == META
    assert placement.of("norm.weight") == placement.of("self_conditioning.up_proj.weight") == META
    assert placement.devices == (META, CPU) and placement.summary == "1 of 3 layers on cpu"
    both = make_placement(META, 3, 2, gpu_layers=2)
    assert both == Placement(META, (CPU, META, META), (CPU, CPU, META))
    assert both.summary == "1 of 3 layers on cpu, experts of 1 layers on the CPU"
    assert not make_placement(META, 3, 0, 3).is_mixed
    assert not make_placement(CPU, 3, 1, 1).is_mixed
    assert make_placement(META, 3, gpu_layers=0).devices == (META, CPU)


def test_layers_are_split_over_cards() -> None:
    first, second = torch.device("cuda", 2), torch.device("cuda", 3)
    placement = make_placement(first, 4, 2, 3, split=[1, 2])
    assert placement.layers == (CPU, first, second, second)
    assert placement.experts == (CPU, CPU, second, second)
    assert make_placement(torch.device("cuda"), 2, split=[1, 1]).layers == (
        torch.device("cuda"),
        torch.device("cuda", 1),
    )
    assert not make_placement(CPU, 2, split=[1, 1]).is_mixed


@pytest.mark.parametrize("split", [[], [3], [2, 1], [0, 4], [1, 3.0], [True, 3], [5, -1], [10**30]])
def test_a_wrong_split_is_refused(split: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"split: must be numbers of layers .* 4 in all"):
        make_placement(META, 4, split=split)


def write_tiny(folder: Path) -> Path:
    path = folder / "model.gguf"
    write_gguf(path, random_state(gguf_config()), gguf_config())
    return path


def test_tensors_are_loaded_where_the_placement_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path))
    layers = len(config_of(checkpoint).layers)
    placement = make_placement(META, layers, 1)
    network = load_network(checkpoint, META, torch.float32, placement=placement)
    on_host = {name for name, p in network.transformer.named_parameters() if p.device == CPU}
    assert on_host == {f"layers.0.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")}
    assert network.is_mixed and network.transformer.layers[0].experts.device == CPU
    without = load_network(checkpoint, META, torch.float32)
    held = sum(network.transformer.get_parameter(name).nbytes for name in on_host)
    footprints = [ModelFootprint.of_network(each).weights for each in (without, network)]
    assert footprints[0] - footprints[1] >= held > 0  # the card is not charged for the host's part


def test_results_are_those_of_the_unsplit_network(tmp_path: Path) -> None:
    """With experts on a second CPU device, which is given by its index."""
    checkpoint = open_checkpoint(write_tiny(tmp_path))
    network = load_network(checkpoint, CPU, torch.float32)

    def logits() -> Tensor:
        slot = network.new_slot(40)
        network.encode([torch.arange(30)], [slot])
        return network.head.logits(network.denoise([torch.arange(8) * 7], [slot]))

    expected = logits()
    for layer in network.transformer.layers:
        layer.experts.device = torch.device("cpu", 0)
    assert torch.equal(logits(), expected)


def test_activations_go_to_the_experts_and_their_result_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that a fake tensor stands for: torch would refuse operands of two devices."""
    seen = []

    def record(*given: Any) -> Tensor:
        operands = [each for each in given if isinstance(each, Tensor)]
        seen.extend(operand.device for operand in operands)
        return torch.empty_like(operands[0])

    monkeypatch.setattr(ops, "experts", record)
    config = config_of(open_checkpoint(write_tiny(tmp_path)))
    with FakeTensorMode():
        experts = Experts(config)
        experts.device = CPU
        x = torch.empty(3, config.hidden_size, device="cuda:0")
        chosen = torch.zeros(3, 2, dtype=torch.int64, device="cuda:0")
        result = experts(x, chosen, torch.zeros(3, 2, device="cuda:0"))
    assert [device.type for device in seen] == ["cpu"] * 5
    assert result.device == x.device and x.device.type == "cuda"


def test_what_is_predicted_before_loading_and_which_number_of_layers_fits(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path))
    config = config_of(checkpoint)
    how = checkpoint, config, META, torch.float32, None
    places = (make_placement(META, len(config.layers), count) for count in (0, 1))
    full, partly = (ModelFootprint.of_checkpoint(*how, each) for each in places)
    assert full.weights - partly.weights == full.experts[0] > 0 == partly.experts[0]
    engine = EngineConfig(slots=1, context=64)
    need = predict(full, engine).total - predict(full, engine).libraries

    def advice(lacking: int, room: int | None = None) -> str:
        margin = 1 - engine.memory_margin
        card = Budget(int((need - lacking) / margin), "a test")
        host = None if room is None else Budget(room, "a test")
        with pytest.raises(EngineError) as raised:
            check_load(full, engine, lambda device: host if device == CPU else card)
        return str(raised.value)

    assert "(--experts-on-cpu 1)" in advice(full.experts[0] // 2)
    assert "(--experts-on-cpu 2)" in advice(full.experts[0] * 3 // 2)
    assert "--experts-on-cpu" not in advice(sum(full.experts) + 1000)
    assert "(--experts-on-cpu 1)" in advice(full.experts[0] // 2, full.experts[0])
    assert "(--gpu-layers auto)" in advice(full.experts[0] // 2, full.experts[0] - 1)
    assert "(--" not in advice(full.experts[0] // 2, 100)  # the host has no room for them
