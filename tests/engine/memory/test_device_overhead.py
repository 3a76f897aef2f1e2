"""What a GPU takes beside tensors; a step's buffers against those of a step without numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.fake_device import DEVICE, fake_device, fake_network
from tests.support.live_bytes import LiveBytes

from sfumato.bench.subject import random_config
from sfumato.diffusion.step.graphs import KINDS, MOST, READS
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import (
    CODE,
    GRAPH,
    MIB,
    ModelFootprint,
    held_bytes,
    overhead_bytes,
    pool_bytes,
    predict,
)
from sfumato.model.cache import KVPool, slot_bytes
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.segments import PaddedRows, RowPart
from sfumato.model.truncate import cutoff_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FULL = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b", layers=2), {})


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([1], 2 * MIB),
        ([513] * 2000, 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([3 * MIB] * 6, 20 * MIB),
        ([3 * MIB] * 7, 40 * MIB),
        ([9 * MIB, 8 * MIB, 9 * MIB, 2 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1, 5], 14 * MIB),
        ([], 0),
    ],
)
def test_blocks_are_those_of_torchs_allocator(sizes: list[int], held: int) -> None:
    assert held_bytes(sizes, GPU) == held
    assert held_bytes(sizes, CPU) == sum(sizes)


def test_graphs_hold_the_buffers_of_a_step_once_more() -> None:
    assert overhead_bytes(CPU, 4, 10**9) == 0
    one, many = (overhead_bytes(GPU, rows, 10**9) for rows in (1, 100))
    assert one > 10**9 + CODE + (KINDS + READS) * GRAPH and many - one == (MOST - KINDS) * GRAPH
    footprint = ModelFootprint(FULL, GPU, torch.bfloat16, torch.bfloat16, 0)
    prediction = predict(footprint, EngineConfig(slots=2))
    assert prediction.overhead == overhead_bytes(GPU, 2, prediction.step)
    assert prediction.working > prediction.step + prediction.overhead
    assert predict(replace(footprint, device=CPU), EngineConfig(slots=2)).overhead == 0


def test_a_pool_takes_what_its_slots_do() -> None:
    footprint = ModelFootprint(FULL, CPU, torch.bfloat16, torch.bfloat16, 0)
    slots = 3 * slot_bytes(FULL, 5000, torch.bfloat16)
    assert pool_bytes(footprint, 3, 5000) == slots
    on_device = pool_bytes(replace(footprint, device=GPU), 3, 5000)
    assert slots <= on_device < 1.1 * slots


def test_a_step_of_the_real_size_takes_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]
) -> None:
    """The most bytes of tensors that live at a time in a forward and the pass over the vocabulary
    of four canvases, on a device that holds no numbers. Torch's attention holds no scores."""
    attention = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(attention, lambda q, *rest, scale: torch.empty_like(q))
    rows, context = 4, 4096
    tokens = rows * FULL.canvas_length
    with fake_device():
        network = fake_network(FULL)
        pool = KVPool(FULL, rows, context, torch.bfloat16, DEVICE)
        soft = torch.zeros(tokens, FULL.hidden_size, dtype=torch.bfloat16)
        ids, lengths = torch.zeros(tokens, dtype=torch.int64), torch.full((rows,), 256)
        temperature, uniform = torch.ones(tokens), torch.zeros(tokens, dtype=torch.float64)
        parts = [RowPart(pool, torch.arange(rows), FULL.canvas_length, lengths)]
        given = *network.transformer.parameters(), *pool.keys, *pool.values
        with torch.no_grad(), LiveBytes(*given) as live:
            hidden = network.denoise_batch(ids, soft, PaddedRows(parts))
            network.head(hidden, temperature, uniform)
    footprint = ModelFootprint(FULL, GPU, torch.bfloat16, torch.bfloat16, 0)
    predicted = predict(footprint, EngineConfig(slots=rows, context=context)).step
    predicted -= cutoff_bytes(FULL, tokens)  # no row asks for top-k or top-p here
    figures = f"predicted {predicted / 1e6:.0f} MB, held {live.most / 1e6:.0f} MB"
    note(f"buffers of a step: {figures}")
    assert 0.9 < predicted / live.most < 2
