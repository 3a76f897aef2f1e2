"""A forward of rows of both phases with interpreted kernels is that of the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted, seen_as
from torch import Tensor

from sfumato.bench.subject import random_config
from sfumato.model.adapters import Adapted, LowRank
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart
from sfumato.model.transformer import GatedMLP, Transformer
from sfumato.ops import registry
from sfumato.ops.triton import self_test

pytestmark = interpreted

WIDTH = 4


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    config = DIFFUSION_GEMMA.config.from_hf(random_config("tiny"), {})
    layer = replace(config.layers[0], kv_heads=2, head_dim=16, rope_pairs=8)
    config = replace(config, vocab_size=97, hidden_size=64, intermediate_size=32, num_heads=4)
    config = replace(config, num_experts=3, experts_per_token=2, expert_size=16, layers=(layer,))
    transformer = Transformer(config).requires_grad_(False)
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return Network(transformer, torch.device("cpu"), torch.float32, torch.float32, None)


def test_a_step_of_both_phases(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 denoises, beside row 1, which commits, and alone, with the same bits."""
    slots = network.new_slots(2, 40)
    with registry.reference_only():
        network.encode([torch.arange(20), torch.arange(5)], slots)
    tokens, soft = torch.randint(97, (2, WIDTH)), torch.randn(2, WIDTH, network.config.hidden_size)

    def step(rows: list[int]) -> Tensor:
        numbers = torch.tensor([slots[row].index for row in rows])
        counts = torch.tensor([0, WIDTH])[rows]
        lengths = torch.full((len(rows),), WIDTH)
        part = RowPart(slots[0].pool, numbers, WIDTH, lengths, commits=counts)
        inputs = tokens[rows].flatten(), soft[rows].flatten(0, 1)
        return network.denoise_batch(*inputs, PaddedRows([part]))

    with registry.reference_only():
        expected = step([0, 1])
    operations = frozenset(
        ("linear", "linear_each", "linear_gated", "experts", "attend_padded", "write_cache")
    )
    monkeypatch.setattr(self_test, "_passed", {torch.device("cpu"): operations})
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        both = step([0, 1])
        layers = len(network.config.layers)
        assert launches["experts_gate_up"] == launches["experts_down"] == layers
        assert launches["attention_256"] == layers and launches["linear"] == 4 * layers + 1
        assert launches["linear_gated"] == layers + 1  # that of self-conditioning
        assert launches["write_cache"] == 2 * layers
        alone = step([0])
    close(both[:WIDTH], expected[:WIDTH], 1e-4)
    assert torch.equal(alone, both[:WIDTH])


def test_tokens_of_an_adapter_change_no_bits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are one launch, which rounds once; tokens that an adapter changes have a pass of
    their own, and the same bits alone."""
    device = torch.device("cpu")
    mlp = GatedMLP(64, 32).requires_grad_(False)
    for parameter in mlp.parameters():
        parameter.normal_(std=0.2)
    x, tokens = torch.randn(6, 64), torch.tensor([True, False] * 3)[:, None]
    mlp.up_proj.changes[1] = LowRank(torch.randn(2, 64), torch.randn(32, 2), 0.5)
    operations = frozenset(("linear", "linear_each", "linear_gated"))
    monkeypatch.setattr(self_test, "_passed", {device: operations})
    monkeypatch.setattr("sfumato.ops.kernels_on", lambda device: operations)
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        both = mlp(x, [Adapted(1, tokens)])
        assert launches["linear_gated"] == 1
        others, own = mlp(x, [Adapted(2, tokens)]), mlp(x, [Adapted(1)])
    assert torch.equal(both, torch.where(tokens, own, others))
    assert not torch.equal(own, others)
