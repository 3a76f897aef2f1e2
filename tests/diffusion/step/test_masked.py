"""A masked position: only allowed tokens stand there, and no other position or row sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.support.random_model import random_model
from torch import Tensor

from sfumato.api import Model
from sfumato.diffusion.canvas import Canvas, Draft, Guidance
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import CanvasView, LogitBias, LogitProcessor, MinTokens
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser

LENGTH, AT = 16, 5
ALLOWED = (40, 41, 300)
CONFIGS = (
    SamplerConfig(),
    SamplerConfig(temperature=0),
    SamplerConfig(top_k=2, top_p=0.9),
    SamplerConfig(top_tokens=12),
    SamplerConfig(processors=(LogitBias({40: 3.0}),)),
    SamplerConfig(processors=(LogitBias(dict.fromkeys(ALLOWED, float("-inf"))),)),
)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(canvas_length=LENGTH)


def steps(model: Model, configs: list[SamplerConfig], guided: set[int]) -> list[list[Draft]]:
    """Two steps of some rows; from the second on some are guided."""
    network = model.network
    canvases, slots = [], network.new_slots(len(configs), 8)
    network.encode([torch.tensor([2, 5, 6])] * len(configs), slots)
    for seed, config in enumerate(configs):
        own = replace(config.over(REFERENCE), canvas_length=LENGTH, max_steps=4)
        canvases.append(Canvas(own, Noise(seed, 0), network.config.vocab_size, network.device))
    denoiser = Denoiser(network, rows=2)
    drafts = [denoiser.step(canvases, slots)]
    mask = torch.zeros(model.tokenizer.vocab_size - 1, dtype=torch.bool)
    mask[list(ALLOWED)] = True
    for row in guided:
        canvases[row].guide(Guidance({0: 50, 1: 51}, AT, mask))
    drafts.append(denoiser.step(canvases, slots))
    for row in guided:
        tokens = canvases[row].tokens
        assert tokens[:2].tolist() == [50, 51], "pinned"
        canvases[row].guide(Guidance({}))
    drafts.append(denoiser.step(canvases, slots))
    return drafts


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_only_allowed_tokens_stand_there(model: Model, config: SamplerConfig) -> None:
    drafts = steps(model, [config], {0})
    second = drafts[1][0]
    assert int(second.token_ids[AT]) in ALLOWED
    named = second.top_ids[AT][second.top_probs[AT] > 0]
    assert set(named.tolist()) <= set(ALLOWED) and second.entropy[AT].isfinite()
    assert second.top_ids.shape[1] == (config.top_tokens or 8)
    assert second.accepted[:2].all() and second.entropy[:2].tolist() == [0, 0]
    assert second.top_probs[AT].sum() == pytest.approx(1, abs=1e-5)
    if config.processors and config.processors[0].bias.get(40) == 3.0:  # type: ignore[attr-defined]
        free = steps(model, [SamplerConfig()], {0})[1][0]
        ratio = [
            float(draft.top_probs[AT][draft.top_ids[AT] == 40].sum()) for draft in (second, free)
        ]
        assert ratio[0] > ratio[1], "a bias counts among the allowed ones"


@dataclass(frozen=True)
class Opaque:
    """A processor that does not say what it does."""

    inner: LogitProcessor

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        assert len(scores) == LENGTH
        return self.inner.process(scores, first_id, view)


@pytest.mark.parametrize("count", [AT, AT + 1])
def test_biases_and_bans_at_one_position_are_those_at_all(model: Model, count: int) -> None:
    processors = (LogitBias({41: 2.0, 300: -1.0}), MinTokens(count, (40,)))
    fast, slow = (
        steps(model, [SamplerConfig(processors=own)], {0})[1][0]
        for own in (processors, tuple(map(Opaque, processors)))
    )
    for name in ("token_ids", "entropy", "top_ids", "top_probs"):
        assert getattr(fast, name)[AT].equal(getattr(slow, name)[AT]), name
    assert (float(fast.top_probs[AT][fast.top_ids[AT] == 40].sum()) > 0) == (count <= AT)


def test_no_other_row_sees_it(model: Model) -> None:
    """To the bit, whatever the others ask for."""
    plain = [
        SamplerConfig(),
        SamplerConfig(top_k=4),
        SamplerConfig(processors=(LogitBias({9: 1.0}),)),
    ]
    alone = steps(model, [*plain, SamplerConfig()], set())
    beside = steps(model, [*plain, SamplerConfig()], {3})
    for one, two in zip(alone, beside, strict=True):
        for row in range(3):
            for name in ("token_ids", "entropy", "accepted", "top_ids", "top_probs"):
                assert getattr(one[row], name).equal(getattr(two[row], name)), (row, name)
