"""The bytes and operations of a step, against those that torch counts in one on this CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sfumato.bench.step_cost import (
    KernelCost,
    StepShape,
    _pairs,
    experts_touched,
    held_bytes,
    step_costs,
    stored_bytes,
)
from sfumato.bench.subject import Subject, random_checkpoint, random_config
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.model_config import ModelConfig
from sfumato.ops.attention_reference import Causal
from sfumato.ops.reference import GROUP
from sfumato.ops.registry import reference_only

PREFIX, WIDTH = 40, 32


def config_of(preset: str) -> ModelConfig:
    return DIFFUSION_GEMMA.config.from_hf(random_config(preset), {})


def flop_of(costs: list[KernelCost], *names: str) -> float:
    return sum(cost.flop for cost in costs if cost.name in names)


def test_the_operations_are_those_of_a_real_step(tiny: Subject) -> None:
    """Products of matrices, and grouped ones apart, which pad each expert's tokens."""
    network, config = tiny.network, tiny.network.config
    slot, ids = network.new_slot(64), torch.arange(PREFIX) % 500
    network.encode([ids], [slot])
    grouped = torch.ops.aten._grouped_mm

    def flop_of_groups(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
        return 2 * x[0] * x[1] * weight[2]

    counter = FlopCounterMode(display=False, custom_mapping={grouped: flop_of_groups})
    with reference_only(), counter:
        soft = torch.randn(WIDTH, config.hidden_size)
        hidden = network.denoise([ids[:WIDTH]], [slot], [soft])
        network.head(hidden, torch.ones(WIDTH), torch.rand(WIDTH, dtype=torch.float64))
    counted = counter.get_flop_counts()["Global"]
    costs = step_costs(config, StepShape(1, WIDTH, PREFIX), stored_bytes(config, "f32"))
    names = {cost.name for cost in costs}
    experts = {name for name in names if name.startswith("experts")}
    others = names - experts - {"attention"}
    assert flop_of(costs, *others) == counted[torch.ops.aten.mm]
    chosen = WIDTH * config.experts_per_token
    padded = chosen + (GROUP - 1) * min(config.num_experts, chosen)
    if grouped in counted:  # not every torch dispatches it
        assert flop_of(costs, *experts) * padded / chosen == pytest.approx(counted[grouped])


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize(("prefix", "width"), [(0, 5), (3, 40), (40, 16), (12, 7)])
def test_pairs_are_those_of_the_mask(sliding: bool, prefix: int, width: int) -> None:
    config = config_of("tiny")  # a window of 16
    layer = next(layer for layer in config.layers if layer.sliding is sliding)
    window = config.sliding_window if sliding else None
    new = torch.arange(prefix, prefix + width)
    seen = Causal.of(new, torch.arange(prefix + width), window).mask().sum()
    assert _pairs(StepShape(1, width, prefix, encodes=True), config, layer) == seen
    held = min(prefix, config.sliding_window - 1) if sliding else prefix
    assert _pairs(StepShape(1, width, prefix), config, layer) == width * (held + width)


def test_every_weight_is_read_once() -> None:
    config = config_of("tiny")
    stored = stored_bytes(config, "bf16")
    costs = step_costs(config, StepShape(1, WIDTH, 0), stored, touched=config.num_experts)
    matrices = {name: n for name, n in stored.items() if name.endswith(("proj", "proj.weight"))}
    read = sum(cost.stored for cost in costs if cost.name not in ("vocabulary head", "embedding"))
    assert read == sum(matrices.values())
    assert (
        next(c for c in costs if c.name == "vocabulary head").stored
        == (stored["embed_tokens.weight"])
    )


def test_rows_share_the_weights_and_nothing_else() -> None:
    config = config_of("tiny")
    stored, all_of = stored_bytes(config), config.num_experts
    one, four = (
        step_costs(config, StepShape(rows, WIDTH, PREFIX), stored, all_of) for rows in (1, 4)
    )
    for a, b in zip(one, four, strict=True):
        packed = int(a.name == "embedding")  # a copy of the ids of several rows
        assert (b.flop, b.passed) == (4 * a.flop, 4 * a.passed)
        assert b.launches == a.launches + packed
        if a.name not in ("attention", "embedding"):
            assert a.stored == b.stored


def test_the_experts_that_are_touched() -> None:
    config = config_of("26b-a4b")
    assert experts_touched(config, 1) == pytest.approx(8)
    assert experts_touched(config, 32) == pytest.approx(111.8, abs=0.1)
    assert 127.9 < experts_touched(config, 256) < 128
    every_one = replace(config, num_experts=8)
    assert experts_touched(every_one, 1) == 8


def test_planes_take_little_more_than_the_file() -> None:
    config = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b"), {})
    for format, most in (("q4_k_m", 1.02), ("q8_0", 1.0), ("bf16", 1.0)):
        held = held_bytes(random_checkpoint("26b-a4b", format).tensors)
        stored = stored_bytes(config, format)
        assert stored.keys() == held.keys()
        assert 1.0 <= sum(held.values()) / sum(stored.values()) <= most


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"format: 'q3' is none of q4_k_m, "):
        stored_bytes(config_of("tiny"), "q3")
