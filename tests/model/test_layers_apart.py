"""A forward over layers on several devices: each layer computes where it lives, all operands of an
operation are on one device, and hidden states end where they began.

Tensors of a fake device refuse operands of two devices, as real ones do; those that stand in for
devices elsewhere are all in the host's memory, where nothing would be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support.fake_device import DEVICE, fake_device, fake_network
from tests.support.oracle import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.model.cache import Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.loading import place, set_devices
from sfumato.model.network import Network
from sfumato.model.segments import Suffix
from sfumato.ops import registry

CONFIG = config_from_hf(tiny_config(canvas_length=32, num_experts=2).to_dict())
COUNT = len(CONFIG.layers)
CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


def spread(network: Network, placement: Placement) -> None:
    """Puts the weights of a network where a placement says."""
    for name, value in list(network.transformer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        place(network.transformer.get_submodule(path), leaf, value.detach().to(placement.of(name)))
    set_devices(network.transformer, placement)
    network.placement = placement


def alternating(experts: Sequence[torch.device]) -> Placement:
    layers = tuple((DEVICE, SECOND, CPU)[index % 3] for index in range(COUNT))
    return Placement(DEVICE, layers, tuple(experts[index % len(experts)] for index in range(COUNT)))


PLACEMENTS = {
    "gpu-layers": make_placement(DEVICE, COUNT, gpu_layers=1),
    "none": make_placement(DEVICE, COUNT, gpu_layers=0),
    "split": make_placement(DEVICE, COUNT, split=[1, COUNT - 1]),
    "all": alternating((CPU, CPU, SECOND)),
}


@pytest.fixture(params=PLACEMENTS)
def network(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(Network, "check_ids", lambda *_: None)  # reads ids, which have no numbers
    with fake_device(), registry.reference_only():
        network = fake_network(CONFIG)
        spread(network, PLACEMENTS[request.param])
        yield network


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """Each operation of the network with the one device of its operands."""
    calls: list[tuple[str, torch.device]] = []

    def watch(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        devices = {x.device for x in arguments if isinstance(x, Tensor)}
        assert len(devices) == 1, f"{operation}: {devices}"
        calls.append((operation, *devices))

    monkeypatch.setattr(registry, "_watchers", [watch])
    return calls


def devices_of(seen: list[tuple[str, torch.device]], operation: str) -> tuple[torch.device, ...]:
    return tuple(device for name, device in seen if name == operation)


def rows(network: Network) -> tuple[list[Tensor], list[Slot]]:
    slots = network.new_slots(2, 64)
    for keys, device in zip(slots[0].pool.keys, network.placement.layers, strict=True):
        assert keys.device == device
    return [torch.zeros(9, dtype=torch.int64) for _ in slots], slots


def test_both_phases(network: Network, seen: list[tuple[str, torch.device]]) -> None:
    placement = network.placement
    prompts, slots = rows(network)
    network.encode(prompts, slots)
    assert devices_of(seen, "experts") == placement.experts
    assert slots[1].length == 9
    seen.clear()
    canvases = [prompts[0], prompts[0][:5]]
    hidden = network.denoise(canvases, slots, [torch.zeros(9, CONFIG.hidden_size), None])
    assert hidden.device == DEVICE
    assert devices_of(seen, "experts") == placement.experts
    parts = [device for device in placement.layers for _ in range(2)]  # canvases of two widths
    assert devices_of(seen, "attend_padded") == tuple(parts)


class Crossings(TorchDispatchMode):
    """The devices that hidden states of a forward are copied from and to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() != "aten::_to_copy" or args[0].shape[-1:] != (CONFIG.hidden_size,):
            return out
        if args[0].device != out.device:
            self.seen.append((str(args[0].device), str(out.device)))
        return out


def test_hidden_states_go_from_card_to_card(network: Network) -> None:
    """At borders alone, and without the host where no layer is there."""
    prompts, slots = rows(network)
    with Crossings() as crossings:
        network.denoise(prompts, slots)
    path = [DEVICE]
    for own, experts in zip(network.placement.layers, network.placement.experts, strict=True):
        path += [own, experts, own]
    path.append(DEVICE)
    borders = [(str(a), str(b)) for a, b in pairwise(path) if a != b]
    assert crossings.seen == borders
    assert ("cpu" in sum(borders, ())) == (CPU in network.placement.devices)


def test_snapshots_stay_on_the_devices_of_their_layers(network: Network) -> None:
    prompts, (slot, other) = rows(network)
    network.encode(prompts, [slot, other])
    snapshot = slot.snapshot()
    sliding = [
        at
        for layer, at in zip(CONFIG.layers, network.placement.layers, strict=True)
        if layer.sliding
    ]
    assert [ring.device for ring in snapshot.rings] == [at for at in sliding for _ in range(2)]
    other.restore(slot, 9, snapshot)
    assert other.length == 9


@pytest.mark.parametrize("network", ["gpu-layers", "all"], indirect=True)
def test_reads(network: Network, seen: list[tuple[str, torch.device]]) -> None:
    placement = network.placement
    prompts, slots = rows(network)
    network.encode(prompts, slots)
    suffixes = [Suffix(slot) for slot in slots]
    questions = [row[:4] for row in prompts]
    seen.clear()
    network.encode_beside(questions, suffixes)
    assert devices_of(seen, "experts") == placement.experts[:-1]  # of the last layer keys alone
    seen.clear()
    network.encode_beside_hidden(questions, suffixes)
    assert devices_of(seen, "experts") == placement.experts
    seen.clear()
    hidden = network.denoise_beside([row[:6] for row in prompts], suffixes, [[1], [0, 3]])
    assert hidden.device == DEVICE and len(hidden) == 3
    assert devices_of(seen, "experts") == placement.experts
