"""The memory of a tuning step: what is predicted against what tensors take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.live_bytes import LiveBytes
from tests.train.test_frozen_network import RANK, stored_network

from sfumato.bench import subject
from sfumato.bench.subject import PRESETS, random_checkpoint
from sfumato.model.adapters import Adapted
from sfumato.model.loading import config_of
from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasBatch
from sfumato.train.memory import adapter_size, step_memory
from sfumato.train.tune import Tuning, new_adapter

TARGETS = ("attention", "mlp", "self-conditioning")
SMALL = {"num_hidden_layers": 3, "num_experts": 4, "top_k_experts": 2}
CARD = 24 * 10**9


def batch_of(vocab: int, rows: int, context: int, canvas: int) -> CanvasBatch:
    ids = torch.arange(rows * (context + canvas)).view(rows, -1) % vocab
    text, target = ids.split([context, canvas], 1)
    lengths, filled = torch.full((rows,), context - 9), torch.ones(rows, canvas, dtype=torch.bool)
    learned = torch.ones(rows, context - 1, dtype=torch.bool)
    others = lengths, torch.zeros(0, 3, dtype=torch.int64)
    return CanvasBatch(text, lengths, learned, ~learned, target, target, filled, filled, *others)


@pytest.mark.parametrize(
    ("changes", "rows", "context", "dtype", "recompute"),
    [
        ({}, 1, 160, torch.float32, True),
        ({"intermediate_size": 512}, 2, 64, torch.bfloat16, True),
        ({"vocab_size": 4096}, 1, 96, torch.float32, False),
    ],
)
def test_the_prediction_is_close_to_the_bytes_of_tensors(
    changes: dict[str, int],
    rows: int,
    context: int,
    dtype: torch.dtype,
    recompute: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny: dict[str, Any] = dict(PRESETS["tiny"])
    tiny["text_config"] = tiny["text_config"] | SMALL | changes
    monkeypatch.setattr(subject, "PRESETS", {"tiny": tiny})
    monkeypatch.setattr(objective, "CONDITIONED", 1.0)
    network, held = stored_network(dtype)
    network.repeats_layers, config = recompute, network.config
    adapter = new_adapter(
        *(config, Tuning(targets=TARGETS, rank=RANK), torch.device("cpu"), torch.Generator())
    )
    learned = [half for change in adapter.values() for half in (change.down, change.up)]
    network.attach(1, adapter)
    batch = batch_of(config.vocab_size, rows, context, config.canvas_length)
    with LiveBytes(*held) as live:
        losses = objective.loss(network, batch, adapted=(Adapted(1),), dtype=dtype)
        torch.autograd.grad(sum(losses.values()), learned)
    size = adapter_size(config, TARGETS, RANK)
    assert size == sum(map(torch.numel, learned))
    predicted = step_memory(config, 0, size, context, rows, dtype, recompute)
    # The gradients are counted; what learns and its means are not made here.
    assert live.most == pytest.approx(predicted.total - 3 * 4 * size, rel=0.15)


def test_a_card_of_24_gb_tunes_an_adapter_of_the_26b_in_4_bits() -> None:
    checkpoint = random_checkpoint("26b-a4b", "q4_k_m")
    config, weights = config_of(checkpoint), sum(t.nbytes for t in checkpoint.tensors.values())
    size = adapter_size(config, TARGETS, 16)
    kept, again = (
        step_memory(config, weights, size, 1024, 1, torch.bfloat16, recompute).total
        for recompute in (False, True)
    )
    assert again < 0.8 * CARD < CARD < kept
