"""Pinned positions in many random runs: other samplers, widths, processors and pins of each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.support.denoise import denoise_step
from tests.support.random_model import random_model

from sfumato.api import Model
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import FixedCount, LogitBias, Never, Threshold
from sfumato.diffusion.sampler_config import SamplerConfig

STEPS, TOGETHER = 2, 250
SAMPLERS = (
    SamplerConfig(),
    SamplerConfig(temperature=0),
    SamplerConfig(sampler=FixedCount(3)),
    SamplerConfig(sampler=Threshold(0.2)),
    SamplerConfig(top_k=4),
    SamplerConfig(processors=(LogitBias({5: float("-inf")}),)),
)


def canvas(model: Model, seed: int) -> Canvas:
    chosen, vocab = random.Random(seed), model.config.vocab_size
    length, share = chosen.choice((2, 7, 16)), chosen.random()
    pins = {at: chosen.randrange(vocab) for at in range(length) if chosen.random() < share}
    # Those that are scored in groups of their own are slower, and fewer.
    sampler = SAMPLERS[chosen.choices(range(len(SAMPLERS)), (40, 20, 20, 20, 1, 1))[0]]
    own = replace(sampler, max_steps=STEPS, stopping=Never(), canvas_length=length)
    config, noise = own.over(model.sampler_defaults), Noise(seed, 0)
    bare = chosen.random() < 0.5
    return Canvas(config, noise, vocab, torch.device("cpu"), (), pins, hard_pins=bare)


def changed(model: Model, seeds: range) -> int:
    """Pinned positions that have another token in a draft, or in what the next step reads."""
    canvases = [canvas(model, seed) for seed in seeds]
    slot, count = model.network.new_slot(1), 0
    model.network.encode([torch.tensor([2])], [slot])
    for _ in range(STEPS):
        drafts = denoise_step(model.network, canvases, [slot] * len(canvases))
        for each, draft in zip(canvases, drafts, strict=True):
            for tokens in (draft.token_ids, each.tokens):
                count += int(((tokens != each.pinned) & (each.pinned >= 0)).sum())
    return count


@pytest.mark.parametrize(
    "runs", [TOGETHER, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_pinned_position_changes(runs: int) -> None:
    model = random_model(canvas_length=16)
    starts = range(0, runs, TOGETHER)
    assert sum(changed(model, range(start, start + TOGETHER)) for start in starts) == 0
