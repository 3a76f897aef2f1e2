"""The buffers of kernels in a prediction: they stand in the place of what torch would take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfumato import ops
from sfumato.bench.subject import random_config
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import (
    ModelFootprint,
    Prediction,
    _expert_kernels,
    predict,
)
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.ops.triton import OPERATIONS, serving, tiles, workspaces

GPU = torch.device("cuda")
FULL = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b", layers=6), {})
FOOTPRINT = ModelFootprint(FULL, GPU, torch.bfloat16, torch.bfloat16, 0)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tiles, "measured", lambda kernel, device: {})


def predicted(
    monkeypatch: pytest.MonkeyPatch,
    operations: frozenset[str],
    footprint: ModelFootprint = FOOTPRINT,
    context: int = 32768,
) -> Prediction:
    monkeypatch.setattr(ops, "kernels_on", lambda device: operations)
    return predict(footprint, EngineConfig(slots=4, context=context, prefill_chunk=4096))


def test_kernels_read_slots_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefix has four parts in float32, however long it is; torch copies all slots three
    times instead."""
    parts = 4 * 4 * 256 * 16 * (512 + 2) * 4
    assert workspaces.attention_bytes(4 * 256, 16, 512, 32768, GPU) == parts
    assert workspaces.attention_bytes(4 * 256, 16, 512, 2048, GPU) == 0
    none = predicted(monkeypatch, frozenset())
    kernel = predicted(monkeypatch, frozenset(("attend_padded",)))
    assert none.step > kernel.step + 10**8
    longer, short = (
        predicted(monkeypatch, frozenset(("attend_padded",)), context=n) for n in (65536, 2048)
    )
    assert longer.step == kernel.step > short.step


def test_a_chunk_of_a_prompt_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = 2 * (32768 + 4096) * 2 * 512 * 2 + (32768 + 4096) * 8
    assert workspaces.prefill_bytes(32768 + 4096, 2, 512, 2, GPU) == joined
    none = predicted(monkeypatch, frozenset())
    kernel = predicted(monkeypatch, frozenset(("attend",)))
    assert kernel.prefill < none.prefill and kernel.step == none.step


def test_the_larger_counts_where_the_form_of_a_weight_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = predicted(monkeypatch, frozenset())
    head = predicted(monkeypatch, frozenset(("vocabulary_pass",)))
    taken = workspaces.head_bytes(4 * 256, FULL.vocab_size, FULL.hidden_size, 2, GPU)
    assert 0 <= head.step - none.step < taken < 150e6
    assert predicted(monkeypatch, frozenset(("experts",))).step == none.step
    monkeypatch.setattr(ops, "kernels_on", lambda device: frozenset(("experts",)))
    experts = _expert_kernels(FOOTPRINT, 1024)
    assert experts == pytest.approx(8192 * (704 + 2816) * 2, rel=0.02)


def test_kernels_that_do_not_serve_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    none = predicted(monkeypatch, frozenset())
    wide = replace(FOOTPRINT, cache_dtype=torch.float32)
    plain = predicted(monkeypatch, frozenset(), wide)
    assert predicted(monkeypatch, frozenset(OPERATIONS), wide) == plain != none


def test_which_kernels_serve_before_they_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.ops.triton import self_test

    assert serving(torch.device("cpu")) == frozenset()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(self_test, "usable", lambda device: False)
    device = torch.device("cuda", 7)
    assert serving(device) == frozenset()
    monkeypatch.setattr(self_test, "usable", lambda device: True)
    monkeypatch.setattr(
        "sfumato.ops.triton.slower", lambda operation, device: operation == "linear"
    )
    assert serving(device) == OPERATIONS.keys() - {"linear"}
    monkeypatch.setattr(self_test, "_passed", {device: frozenset(("route",))})
    assert serving(device) == {"route"}
