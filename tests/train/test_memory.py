"""The memory of a tuning step: what is predicted against what tensors take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.live_bytes import LiveBytes
from tests.train.test_frozen_network import RANK, stored_network
from torch import nn

from sfumato.bench import subject
from sfumato.bench.subject import PRESETS, random_checkpoint
from sfumato.model.adapters import Adapted
from sfumato.model.loading import config_of
from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasBatch
from sfumato.train.memory import Trained, adapter_size, step_memory
from sfumato.train.recipe import TOWER
from sfumato.train.trainer import Gradients, Trainer, Watch, adamw
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


ALL = (*TARGETS, "experts", "router")
WIDE = {"intermediate_size": 512}
DEEP = {"vocab_size": 4096}


@pytest.mark.parametrize(
    ("changes", "rows", "context", "dtype", "recompute", "trained", "parts"),
    [
        (WIDE, 2, 64, torch.bfloat16, False, Trained(TARGETS, RANK), 1),
        (DEEP, 1, 96, torch.float32, False, Trained(TARGETS, RANK), 1),
        ({}, 1, 96, torch.bfloat16, True, Trained(ALL, RANK), 1),
        ({}, 1, 160, torch.float32, False, Trained(ALL, RANK), 1),
        ({}, 1, 160, torch.float32, False, Trained(TARGETS, RANK, stored=False), 1),
        ({}, 1, 96, torch.float32, True, Trained(full=True, stored=False, sums=True), 2),
        ({}, 1, 96, torch.float32, False, Trained(TARGETS, RANK, sums=True), 2),
    ],
)
def test_the_prediction_is_close_to_the_bytes_of_tensors(
    changes: dict[str, int],
    rows: int,
    context: int,
    dtype: torch.dtype,
    recompute: bool,
    trained: Trained,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny: dict[str, Any] = dict(PRESETS["tiny"])
    tiny["text_config"] = tiny["text_config"] | SMALL | changes
    monkeypatch.setattr(subject, "PRESETS", {"tiny": tiny})
    monkeypatch.setattr(objective, "CONDITIONED", 1.0)
    network, held = stored_network(dtype, trained.stored)
    network.recomputes_layers, config = recompute, network.config
    learned: nn.Module = network.requires_grad_(trained.full)
    adapted: tuple[Adapted, ...] = ()
    if not trained.full:
        tuning = Tuning(targets=trained.targets, rank=RANK)
        adapter = new_adapter(config, tuning, torch.device("cpu"), torch.Generator())
        learned = nn.ParameterList([x for each in adapter.values() for x in (each.down, each.up)])
        network.attach(1, adapter)
        adapted = (Adapted(1),)
    trainer = Trainer("it", learned, adamw(learned), 1, Watch(), accumulate=parts)
    batch = batch_of(config.vocab_size, rows, context, config.canvas_length)

    def gradients() -> Iterator[Gradients]:
        for _ in range(parts):
            losses = objective.loss(network, batch, adapted=adapted, dtype=dtype)
            yield trainer.gradients(losses, dict.fromkeys(losses, 1.0))

    with LiveBytes(*held, *learned.parameters()) as live:
        for _ in range(2):  # the first one makes the optimiser's means
            trainer.step(gradients(), 1e-3)
    size = sum(map(torch.numel, learned.parameters()))
    if not trained.full:
        assert size == adapter_size(config, trained.targets, RANK)
    predicted = step_memory(config, 0, size, context, rows, dtype, recompute, trained)
    counted = live.most + (0 if trained.full else 4 * size)
    assert 0.98 * counted <= predicted.total <= 1.15 * counted


def test_what_is_kept_beside_and_pictures_count() -> None:
    config = config_of(random_checkpoint("tiny"))
    how = config, 0, 10**6, 64, 1, torch.float32, True
    plain, best = (step_memory(*how, Trained(keeps=keeps)).total for keeps in (False, True))
    assert best - plain == 4 * 10**6
    assert step_memory(*how, tower=TOWER).total > plain


def test_a_card_of_24_gb_tunes_an_adapter_of_the_26b_in_4_bits() -> None:
    checkpoint = random_checkpoint("26b-a4b", "q4_k_m")
    config, weights = config_of(checkpoint), sum(t.nbytes for t in checkpoint.tensors.values())
    size = adapter_size(config, TARGETS, 16)
    kept, again = (
        step_memory(config, weights, size, 1024, 1, torch.bfloat16, recompute).total
        for recompute in (False, True)
    )
    assert again < 0.8 * CARD < CARD < kept
