"""The memory of forwards of reads where torch serves them, as predicted and as held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.fake_device import DEVICE, traced
from tests.support.gguf_files import gguf_config
from tests.support.live_bytes import LiveBytes

from sfumato import ops
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import ModelFootprint, _reads, _seen_of_reads, predict


def subject(**fields: Any) -> ModelFootprint:
    """A model that lies on a device without compiled operations."""
    config = gguf_config(sliding_window=8, canvas_length=32, context_length=1 << 20)
    return replace(
        ModelFootprint(config, torch.device("cuda"), torch.bfloat16, torch.bfloat16, 0), **fields
    )


def test_reads_copy_a_larger_slot_once() -> None:
    """A pool of one slot has one row in a forward of reads, whatever the other slots are."""

    def overhead(slots: int, larger: int) -> int:
        """Which has the buffers of a step or of reads once more."""
        return predict(subject(), EngineConfig(slots=slots, context=1 << 10), larger).overhead

    for slots in (1, 4):
        assert overhead(slots, 1 << 20) - overhead(slots, 3 << 18) == (1 << 18) * 32 * 6
    four, many = (_reads(subject(), slots, 512, [(slots, 1 << 20)])[0] for slots in (4, 40))
    assert 7.5 < many / four < 8, "32 rows of 16 positions are all that a forward has"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_the_reference_of_reads_holds_what_is_predicted(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a step, of four rows of 128 positions; a cache in float32 is gathered as it is."""
    attention = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(attention, lambda q, *rest, scale: torch.empty_like(q))
    rows, capacity, footprint = 4, 5000, subject(cache_dtype=stored)
    model, layer = footprint.config, footprint.config.layers[-1]
    with traced(), LiveBytes() as live:
        new = [
            torch.empty(rows, 128, heads, layer.head_dim, dtype=torch.bfloat16, device=DEVICE)
            for heads in (model.num_heads, layer.kv_heads, layer.kv_heads)
        ]
        pool, beside = (
            torch.empty(*shape, layer.head_dim, dtype=stored, device=DEVICE)
            for shape in ((rows, layer.kv_heads, capacity), (layer.kv_heads, 2048))
        )
        numbers = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        before = live.now()
        questions = ops.Questions(beside, beside, numbers, numbers, 256)
        ops.attend_padded(*new, ops.Rows(pool, pool, numbers, numbers, questions=questions))
    predicted = _seen_of_reads(footprint, rows, capacity, 512)
    assert 0.9 < predicted / (live.most - before) < 1.1
