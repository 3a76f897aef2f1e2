"""Adapters attached to a network: the same bits in any company, the change that a merged weight
has, and refusals that name the module."""

from __future__ import annotations

import pytest
import torch
from tests.support.oracle import network_of, random_oracle, relative, tiny_config
from torch import Tensor

from sfumato.model.adapters import Adapter, LowRank
from sfumato.model.network import Network
from sfumato.refused import Refused

PATHS = (
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.v_proj",
    "layers.1.self_attn.k_proj",
    "layers.2.self_attn.o_proj",
    "layers.2.mlp.up_proj",
    "layers.0.experts.gate_up_proj",
    "layers.1.experts.gate_up_proj",
    "layers.1.experts.down_proj",
    "layers.1.router.proj",
    "self_conditioning.down_proj",
)
PROMPTS = [torch.arange(3, 12), torch.arange(20, 25), torch.arange(40, 47)]
CANVAS = torch.arange(50, 58)


def fresh() -> Network:
    return network_of(random_oracle(tiny_config(), 11))


def adapter_for(network: Network, seed: int, rank: int = 3) -> Adapter:
    generator, changes = torch.Generator().manual_seed(seed), {}
    for path in PATHS:
        *count, out, inputs = weight_of(network, path).shape
        shapes = (*count, rank, inputs), (*count, out, rank)
        down, up = (torch.randn(shape, generator=generator) * 0.1 for shape in shapes)
        changes[path] = LowRank(down, up, 2.0)
    return changes


def weight_of(network: Network, path: str) -> Tensor:
    name = path if ".experts." in path else f"{path}.weight"
    return network.transformer.get_parameter(name)


def answers(network: Network, numbers: list[int]) -> list[Tensor]:
    """Hidden states of the canvases of rows with these adapters, in one batch, after two forwards:
    the second has a soft embedding."""
    slots = network.new_cache(len(numbers), capacity=32)
    for slot, number in zip(slots, numbers, strict=True):
        slot.adapter = number
    network.encode([PROMPTS[i % 3] for i in range(len(numbers))], slots)
    canvases = [CANVAS] * len(numbers)
    first = network.denoise(canvases, slots)
    return list(network.denoise(canvases, slots, first.split(len(CANVAS))).split(len(CANVAS)))


def test_rows_of_different_adapters_have_the_bits_that_they_have_alone() -> None:
    network = fresh()
    plain = answers(network, [0, 0, 0])
    for number in (1, 2):
        network.transformer.attach(number, adapter_for(network, number))
    mixed, ones, twos = (answers(network, each) for each in ([0, 1, 2], [1, 1, 1], [2, 2, 2]))
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[1], ones[1])
    assert torch.equal(mixed[2], twos[2])
    assert not torch.allclose(ones[1], plain[1], rtol=1e-3)
    assert not torch.allclose(ones[2], twos[2], rtol=1e-3)
    network.transformer.detach(1)
    assert torch.equal(answers(network, [1, 1, 1])[1], plain[1])


def test_an_adapter_changes_what_its_sum_with_the_weights_would() -> None:
    network, merged = fresh(), fresh()
    adapter = adapter_for(network, 5)
    network.transformer.attach(1, adapter)
    with torch.no_grad():
        for path, change in adapter.items():
            weight_of(merged, path).add_(change.change())
    for ours, theirs in zip(answers(network, [1, 1]), answers(merged, [0, 0]), strict=True):
        assert relative(ours, theirs) < 1e-5


def test_what_does_not_fit_is_refused_by_the_module_and_nothing_changes() -> None:
    network = fresh()
    adapter = dict(adapter_for(network, 5))
    network.transformer.attach(1, adapter)
    before = answers(network, [1])[0]
    width = network.config.hidden_size
    for path, change in (
        ("layers.9.self_attn.q_proj", adapter[PATHS[0]]),
        ("layers.0.input_layernorm", adapter[PATHS[0]]),
        (PATHS[3], LowRank(torch.zeros(2, width + 1), torch.zeros(width, 2), 1.0)),
        (PATHS[3], LowRank(torch.zeros(2, width), torch.zeros(width, 3), 1.0)),
        ("layers.0.experts", adapter[PATHS[5]]),
        ("layers.0.experts.up_proj", adapter[PATHS[5]]),
        (PATHS[5], adapter[PATHS[0]]),
        (PATHS[5], LowRank(torch.zeros(7, 3, width), torch.zeros(7, width, 3), 1.0)),
    ):
        with pytest.raises(Refused, match=path.replace(".", r"\.")):
            network.transformer.attach(1, adapter | {path: change})
    assert torch.equal(answers(network, [1])[0], before)
