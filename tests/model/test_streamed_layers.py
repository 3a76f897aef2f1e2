"""Layers whose weights wait in the host's memory: what the buffers hold when they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_device import DEVICE, fake_device, fake_network
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.late_copies import LateCopies
from tests.support.oracle import tiny_config
from torch import Tensor

from sfumato.model import loading
from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.loading import KeptWeights, config_of, load_network, set_devices
from sfumato.model.network import Network
from sfumato.model.streamed_layers import (
    ALIGNMENT,
    HostMemory,
    KeptLayer,
    StreamedLayers,
    buffers_of,
    kept_bytes,
)
from sfumato.ops import registry
from sfumato.ops.side_copies import SideCopies
from sfumato.ops.triton.planes import to_planes
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize, round_rows

CPU, META = torch.device("cpu"), torch.device("meta")


def kept(
    values: Sequence[Any], copies: SideCopies, piece: int = 1024
) -> tuple[dict[int, Any], Any]:
    """Layers of one weight each, and where their weights will be put."""
    weights: dict[int, Any] = {}
    memory, layers = HostMemory(copies, piece), {}
    for number, value in enumerate(values):
        layers[number] = KeptLayer(memory)
        layers[number].keep(value, lambda put, number=number: weights.update({number: put}))
    return layers, weights


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_layer_finds_its_weights_and_none_are_copied_over_that_are_in_use(count: int) -> None:
    copies = LateCopies()
    values = [torch.full((70 + number,), number, dtype=torch.uint8) for number in range(count)]
    layers, weights = kept(values, copies)
    streams = StreamedLayers(CPU, layers, copies)
    assert len(streams.buffers) == min(2, count)
    for _ in range(3):
        copies.log.clear()
        for number, value in enumerate(values):
            with streams.present(number):
                assert torch.equal(weights[number], value)
                copies.log.append(f"compute {number}")
    assert sum(line.startswith("copy") for line in copies.log) == (0, 0, 2, 4, 5)[count - 1]
    if count == 4:  # one layer is copied while the one before it is computed; the last two copies
        assert copies.log == [  # are those of the next forward
            *("wait 0", "compute 0", "copy 2", "wait 1", "compute 1", "copy 3"),
            *("wait 2", "compute 2", "copy 0", "wait 3", "compute 3", "copy 1"),
        ]


def test_forwards_that_end_early_and_layers_out_of_turn() -> None:
    copies = LateCopies()
    values = [torch.full((300,), number, dtype=torch.uint8) for number in range(5)]
    layers, weights = kept(values, copies)
    streams = StreamedLayers(CPU, layers, copies)
    for number in (0, 1, 2, 0, 1, 4, 3, 3, 0):
        with streams.present(number):
            assert torch.equal(weights[number], values[number])
    with pytest.raises(ZeroDivisionError), streams.present(1):
        raise ZeroDivisionError
    with streams.present(1):
        assert torch.equal(weights[1], values[1])


def test_a_copy_that_cannot_start_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = SideCopies()
    values = [torch.full((300,), number, dtype=torch.uint8) for number in range(4)]
    layers, weights = kept(values, copies)
    streams = StreamedLayers(CPU, layers, copies)

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError), streams.present(0):
        monkeypatch.setattr(copies, "start", fail)
    monkeypatch.undo()
    with streams.present(0):
        assert torch.equal(weights[0], values[0])


def blocks(format: str) -> QuantizedTensor:
    return quantize(torch.randn(6, 512), FORMATS[format])


def test_weights_of_every_form_come_back() -> None:
    torch.manual_seed(0)
    copies = SideCopies()
    values = [
        torch.randn(3, 5),
        torch.randn(7, 2).bfloat16().t(),
        torch.randn(1),
        blocks("Q8_0"),
        to_planes(blocks("Q4_K")),
        round_rows(torch.randn(4, 64), "FP8"),
        torch.randn(100, 30),
    ]
    memory, weights = HostMemory(copies, 1024), []
    layer = KeptLayer(memory)
    for value in values:
        layer.keep(value, weights.append)
    assert layer.nbytes % ALIGNMENT == 0 and not weights
    streams = StreamedLayers(CPU, {3: layer}, copies)
    with streams.present(3):
        for value, other in zip(values, weights, strict=True):
            tensors = [
                each if isinstance(each, Tensor) else each.dequantize() for each in (value, other)
            ]
            assert torch.equal(*tensors) and tensors[0].dtype == tensors[1].dtype
            assert type(other) is type(value)
    assert streams.nbytes == layer.nbytes == len(streams.buffers[0])


def test_few_copies_for_a_layer_of_many_tensors() -> None:
    memory = HostMemory(SideCopies(), 1 << 16)
    layers = []
    for _ in range(2):
        layers.append(KeptLayer(memory))
        for _ in range(20):
            layers[-1].keep(torch.ones(8), lambda _: None)
    assert [len(layer.parts) for layer in layers] == [1, 1]


def test_what_is_counted_beforehand() -> None:
    assert buffers_of([]) == [] and buffers_of([5]) == [5] and buffers_of([5, 9, 7]) == [9, 9]
    assert kept_bytes([]) == 0 and kept_bytes([1]) == kept_bytes([1 << 25, 1 << 25]) == 1 << 26


@pytest.mark.parametrize("late", [False, True])
def test_results_are_those_of_the_network_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_state(gguf_config()), gguf_config())
    checkpoint = open_checkpoint(path)
    count = len(config_of(checkpoint).layers)
    copies = LateCopies() if late else SideCopies()
    monkeypatch.setattr(loading, "side_copies", lambda _: copies)

    def logits(network: Network) -> Tensor:
        slot = network.new_slot(40)
        network.encode([torch.arange(30)], [slot])
        return network.head.logits(network.denoise([torch.arange(8) * 7], [slot]))

    expected = logits(load_network(checkpoint, CPU, torch.float32))
    own = (CPU,) * count
    for streamed in (range(count), range(1), range(1, count)):
        placement = Placement(CPU, own, own, tuple(streamed))
        network = load_network(checkpoint, CPU, torch.float32, placement=placement)
        assert network.is_mixed and torch.equal(logits(network), expected)
        assert len(network.transformer.streams[0].buffers) == min(2, len(streamed))


def test_on_a_fake_card_nothing_is_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_hf(tiny_config(canvas_length=32).to_dict())
    monkeypatch.setattr(Network, "check_ids", lambda *_: None)  # reads ids, which have no numbers
    count = len(config.layers)
    placement = make_placement(DEVICE, count, 1, 0, other_layers="stream")
    devices = set()

    def watch(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        own = {x.device for x in arguments if isinstance(x, Tensor)}
        assert len(own) == 1, operation
        devices.add((operation, *own))

    monkeypatch.setattr(registry, "_watchers", [watch])
    with fake_device(), registry.reference_only():
        network = fake_network(config)
        weights = KeptWeights(placement)
        for name, value in list(network.transformer.named_parameters()):
            weights.put(network.transformer, name, value.detach().to(placement.of(name)))
        set_devices(network.transformer, placement)
        weights.stream(network.transformer)
        network.placement = placement
        slots = network.new_slots(2, 64)
        prompts = [torch.zeros(9, dtype=torch.int64) for _ in slots]
        network.encode(prompts, slots)
        network.denoise(prompts, slots)
        (streams,) = network.transformer.streams
        assert [buffer.device for buffer in streams.buffers] == [DEVICE] * 2
    assert ("experts", CPU) in devices and ("experts", DEVICE) in devices
    assert ("attend_padded", CPU) not in devices


def test_the_option_of_a_placement() -> None:
    placement = make_placement(META, 3, 1, 1, other_layers="stream")
    assert placement == Placement(META, (META,) * 3, (CPU, META, META), (0, 1))
    assert placement.is_mixed and placement.devices == (META, CPU)
    names = "layers.0.experts.down_proj", "layers.1.experts.down_proj", "layers.0.layer_scalar"
    assert [placement.streamed_layer(name) for name in names] == [None, 1, 0]
    others = "layers.2.experts.down_proj", "norm.weight", "embed_tokens.weight"
    assert [placement.streamed_layer(name) for name in others] == [None] * 3
    assert not make_placement(CPU, 3, 0, 1, other_layers="stream").is_mixed
    assert not make_placement(META, 3, other_layers="stream").is_mixed
    with pytest.raises(ValueError, match="other_layers: 'disk' is none of auto, cpu, stream"):
        make_placement(META, 3, other_layers="disk")
