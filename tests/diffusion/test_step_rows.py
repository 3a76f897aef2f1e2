"""Whole steps of rows: each is the same alone and in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.diffusion.head_only import (
    CPU,
)
from tests.diffusion.tiny import calm_oracle
from tests.support.denoise import denoise_step
from tests.support.oracle import network_of

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    FixedCount,
    LinearTemperature,
    LogitBias,
    MinTokens,
    Never,
    StableAndConfident,
    Threshold,
)
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.cache import Slot
from sfumato.model.network import Network


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


ROWS: list[tuple[int, dict[str, Any]]] = [  # prompt length, choices
    (5, {}),
    (17, {"temperature": 0.0, "max_steps": 20}),
    (1, {"top_k": 3, "canvas_length": 5}),
    (30, {"sampler": FixedCount(1), "stopping": StableAndConfident(2, 0.5)}),
    (
        9,
        {
            "top_p": 0.8,
            "temperature": 1.3,
            "processors": (LogitBias({4: 3.0}), MinTokens(14, (4,))),
        },
    ),
    (2, {"sampler": Threshold(0.7), "schedule": LinearTemperature(0.1, 0.3), "max_steps": 6}),
    (12, {"self_conditioning": False, "canvas_length": 1}),
    (8, {"stopping": Never(), "max_steps": 3}),
    (14, {"stopping": Never(), "canvas_length": 7}),
    (21, {"processors": (MinTokens(3, (4,)),)}),
]


def begin(network: Network, index: int) -> tuple[Canvas, Slot]:
    length, choices = ROWS[index]
    config = SamplerConfig(**({"max_steps": 12, "canvas_length": 8} | choices)).over(REFERENCE)
    random = torch.Generator().manual_seed(index)
    slot = network.new_slot(64)
    network.encode([torch.randint(0, 97, (length,), generator=random)], [slot])
    return Canvas(config, Noise(index, index), 97, CPU, [5] * 3 * index), slot


@cache
def alone(network: Network, index: int) -> list[Draft]:
    canvas, slot = begin(network, index)
    drafts = []
    while not canvas.done:
        drafts += denoise_step(network, [canvas], [slot])
    return drafts


def together(network: Network, joins: Sequence[int]) -> list[list[Draft]]:
    """All rows in one batch; row i joins at step joins[i] and leaves when it is done."""
    drafts: list[list[Draft]] = [[] for _ in ROWS]
    live: list[tuple[int, Canvas, Slot]] = []
    step = 0
    while live or step <= max(joins):
        live += [(i, *begin(network, i)) for i, join in enumerate(joins) if join == step]
        canvases, slots = [row[1] for row in live], [row[2] for row in live]
        for (index, _, _), draft in zip(live, denoise_step(network, canvases, slots), strict=True):
            drafts[index].append(draft)
        live = [row for row in live if not row[1].done]
        step += 1
    return drafts


@pytest.mark.parametrize(
    "joins", [[0] * 10, [3, 0, 2, 0, 1, 5, 0, 4, 2, 0]], ids=["at once", "staggered"]
)
def test_a_row_is_the_same_alone_and_in_any_batch(network: Network, joins: list[int]) -> None:
    for index, drafts in enumerate(together(network, joins)):
        expected = alone(network, index)
        assert len(drafts) == len(expected)
        for draft, one in zip(drafts, expected, strict=True):
            assert (draft.canvas, draft.step) == (one.canvas, one.step) == (index, draft.step)
            assert torch.equal(draft.token_ids, one.token_ids)
            assert torch.equal(draft.accepted, one.accepted)
            torch.testing.assert_close(draft.entropy, one.entropy, atol=1e-4, rtol=1e-4)


def test_the_rows_differ(network: Network) -> None:
    steps = [len(alone(network, index)) for index in range(len(ROWS))]
    assert len(set(steps)) > 3


def test_a_step_leaves_the_prefix_alone(network: Network) -> None:
    canvas, slot = begin(network, 0)
    before = [tensor.clone() for layer in range(3) for tensor in slot.read(layer)]
    denoise_step(network, [canvas], [slot])
    after = [tensor for layer in range(3) for tensor in slot.read(layer)]
    assert slot.length == ROWS[0][0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_another_seed_is_another_canvas(network: Network) -> None:
    canvas, slot = begin(network, 0)
    other = Canvas(canvas.config, replace(canvas.noise, seed=99), 97, CPU)
    one, two = denoise_step(network, [canvas, other], [slot, slot])
    assert not torch.equal(one.token_ids, two.token_ids)
