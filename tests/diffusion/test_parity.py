"""A canvas and its sampler, schedule and stopping rule against the reference's classes, on the
same scores and draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diffusion.tiny import inverse_cdf
from tests.support import one_row
from torch import Tensor
from torch.distributions import Categorical
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import EntropyBound, LinearTemperature, StableAndConfident
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.head import VocabularyHead

NEAR = 1e-5  # of a threshold: float32 sums in another order may fall on its other side


@dataclass(frozen=True)
class Case:
    """A canvas whose scores are made up; `fresh` says at which steps they change."""

    seed: int
    length: int
    vocabulary: int
    max_steps: int
    bound: float
    t_min: float
    t_max: float
    stability: int
    confidence: float
    fresh: tuple[bool, ...]

    def scores(self) -> list[Tensor]:
        """Raw scores [length, vocabulary] of every step, some positions sharp and some flat."""
        random = torch.Generator().manual_seed(self.seed)
        own_logits: list[Tensor] = []
        for fresh in self.fresh[: self.max_steps]:
            if own_logits and not fresh:
                own_logits.append(own_logits[-1])
                continue
            sharpness = 10 ** (3 * torch.rand(self.length, 1, generator=random) - 1)
            shape = self.length, self.vocabulary
            own_logits.append(torch.randn(shape, generator=random) * sharpness)
        return own_logits


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps = draw(st.integers(1, 10))
    t_min = draw(st.floats(0.01, 1))
    return Case(
        seed=draw(st.integers(0, 2**32)),
        length=draw(st.integers(1, 24)),
        vocabulary=draw(st.integers(2, 50)),
        max_steps=steps,
        bound=draw(st.sampled_from((1e-4, 0.01, 0.1, 0.5, 2.0, 50.0))),
        t_min=t_min,
        t_max=t_min + draw(st.floats(0.01, 1)),
        stability=draw(st.integers(0, 3)),
        confidence=draw(st.sampled_from((0.005, 0.1, 0.5, 1.0))),
        fresh=tuple(draw(st.lists(st.booleans(), min_size=steps, max_size=steps))),
    )


def check(case: Case, seen: Callable[[int, int, str | None], None] = lambda *_: None) -> None:
    config = SamplerConfig(
        max_steps=case.max_steps,
        sampler=EntropyBound(case.bound),
        schedule=LinearTemperature(case.t_min, case.t_max),
        stopping=StableAndConfident(case.stability, case.confidence),
        canvas_length=case.length,
    )
    noise = Noise(case.seed, 3)
    canvas = Canvas(config, noise, case.vocabulary, torch.device("cpu"))
    network: Any = SimpleNamespace(head=VocabularyHead(torch.eye(case.vocabulary), 30.0, chunk=7))

    sampler = EntropyBoundSampler(
        EntropyBoundSamplerConfig(case.bound), case.length, case.vocabulary, case.max_steps
    )
    # The reference fills positions with noise through this one method.
    fill = [0]
    sampler.initialize_canvas = lambda rows, device: noise.tokens(  # type: ignore[method-assign]
        fill[0], case.length, case.vocabulary
    )[None]
    schedule = LinearTemperatureScheduleLogitsProcessor(case.t_min, case.t_max, case.max_steps)
    stopping = StableAndConfidentStoppingCriteria(case.stability, case.confidence)

    theirs = sampler.initialize_canvas(1, torch.device("cpu"))
    assert torch.equal(canvas.tokens, theirs[0])
    for step, raw in enumerate(case.scores(), 1):
        remaining = case.max_steps + 1 - step
        processed = schedule(None, network.head.logits(raw), cur_step=remaining)[None]
        entropy = Categorical(logits=processed).entropy()
        before = entropy.sort()[0].cumsum(-1) - entropy.sort()[0]
        if (before - case.bound).abs().min() < NEAR:
            return
        if abs(float(entropy.mean()) - case.confidence) < NEAR:
            return

        uniforms = canvas.uniforms()
        drawn = inverse_cdf(processed[0].softmax(-1, dtype=torch.float32), uniforms)[None]
        accepted = sampler.accept_canvas(theirs, drawn, processed, remaining)
        fill[0] = step
        theirs = sampler.renoise_canvas(accepted, remaining)
        argmax = processed.argmax(-1)
        stop = bool(stopping(argmax, processed))

        draft = one_row.advance(canvas, one_row.score(network.head, raw, [canvas])[0])
        assert draft.step == step
        assert torch.equal(draft.accepted, sampler.accepted_token_mask[0])
        assert torch.equal(draft.token_ids, argmax[0])
        torch.testing.assert_close(draft.entropy, entropy[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(canvas.tokens, theirs[0])
        assert (canvas.convergence == "converged") == stop
        assert canvas.done == (stop or step == case.max_steps)
        seen(int(draft.accepted.sum()), case.length, canvas.convergence)
        if stop:
            return
    assert canvas.convergence == "step_cap"


@settings(max_examples=25)
@given(cases())
def test_settling_equals_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_the_rules_bite(stability: int) -> None:
    """The random cases would prove little if all were accepted, or none ever stopped early."""
    partly, endings = 0, []

    def seen(accepted: int, length: int, convergence: str | None) -> None:
        nonlocal partly
        partly += 0 < accepted < length
        endings.append(convergence)

    for seed in range(12):
        fresh = (True, False, seed % 2 == 0, False, False, False)
        case = Case(seed, 12, 30, 6, 0.1, 0.4, 0.8, stability, 1.0, fresh)
        check(case, seen)
    assert partly > 10
    assert "converged" in endings and "step_cap" in endings


def test_temperatures_equal_the_reference() -> None:
    ours, theirs = LinearTemperature(), LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    for step in range(1, 49):
        expected = 1 / theirs(None, torch.ones(1, dtype=torch.float64), cur_step=49 - step)
        assert ours.temperature(step, 48) == pytest.approx(float(expected), rel=1e-12)
    assert ours.temperature(1, 48) == pytest.approx(0.8)
    assert ours.temperature(48, 48) == pytest.approx(0.4 + 0.4 / 48)
