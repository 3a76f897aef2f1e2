"""Whole replies against `transformers`' own `generate`, step by step, on the same draws."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.diffusion.tiny import calm_oracle, inverse_cdf
from tests.support.oracle import network_of
from torch import Tensor
from torch.distributions import Categorical
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import Limits, Outcome, SettledCanvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import EntropyBound, LinearTemperature, StableAndConfident
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.network import Network
from sfumato.tasks.alone import generate

LENGTH, VOCABULARY, PAD = 8, 97, 0

logging.getLogger("transformers").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Case:
    """One request. eos_at: make an end token of what ends up in this canvas at this position."""

    seed: int
    prompt: int
    max_tokens: int
    max_steps: int = 12
    bound: float = 0.1
    temperatures: tuple[float, float] = (0.4, 0.8)
    stability: int = 1
    confidence: float = 0.005
    eos_at: tuple[int, int] | None = None
    stop_reason: str = "max_tokens"

    def ids(self) -> Tensor:
        random = torch.Generator().manual_seed((self.seed + 1000) % 2**32)
        return torch.randint(3, VOCABULARY, (self.prompt,), generator=random)

    def config(self) -> SamplerConfig:
        return SamplerConfig(
            max_steps=self.max_steps,
            sampler=EntropyBound(self.bound),
            schedule=LinearTemperature(*self.temperatures),
            stopping=StableAndConfident(self.stability, self.confidence),
        )

    def theirs(self, eos: tuple[int, ...]) -> DiffusionGemmaGenerationConfig:
        return DiffusionGemmaGenerationConfig(
            max_new_tokens=self.max_tokens,
            max_denoising_steps=self.max_steps,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=self.bound),
            t_min=self.temperatures[0],
            t_max=self.temperatures[1],
            stability_threshold=self.stability,
            confidence_threshold=self.confidence,
            eos_token_id=list(eos) or None,
            pad_token_id=PAD,
        )


@dataclass
class Step:
    """What went into a denoising step, and what came of it; tensors [length]."""

    tokens: Tensor
    accepted: Tensor
    argmax: Tensor
    entropy: Tensor


@dataclass
class Trajectory:
    """The steps of each canvas, and the reply's tokens."""

    canvases: list[list[Step]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def ours(network: Network, case: Case, eos: tuple[int, ...]) -> tuple[Trajectory, Outcome]:
    recorded, inputs = Trajectory(), []
    denoise = network.denoise_batch

    def spy(tokens: Tensor, *rest: Any) -> Tensor:
        inputs.append(tokens.clone())  # the state is written in place
        return denoise(tokens, *rest)

    with patch.object(network, "denoise_batch", spy):
        limits = Limits(case.max_tokens, eos)
        run = generate(network, case.ids(), case.config(), limits, case.seed)
        steps: list[Step] = []
        while True:
            try:
                event = next(run)
            except StopIteration as end:
                recorded.tokens = end.value.token_ids
                return recorded, end.value
            if isinstance(event, Draft):
                steps.append(Step(inputs[-1], event.accepted, event.token_ids, event.entropy))
            else:
                assert isinstance(event, SettledCanvas)
                recorded.canvases.append(steps)
                steps = []


@contextmanager
def our_noise(seed: int) -> Iterator[None]:
    """Puts our noise behind the reference's two sources of randomness. It draws a canvas of fresh
    tokens before the first step of each canvas, and draws, then fresh tokens, at every step."""
    state = {"canvas": -1, "step": 0, "drawn": False}

    def multinomial(probs: Tensor, num_samples: int) -> Tensor:
        assert num_samples == 1 and not state["drawn"]
        state["step"] += 1
        state["drawn"] = True
        uniforms = Noise(seed, state["canvas"]).uniforms(state["step"], len(probs))
        return inverse_cdf(probs, uniforms)[:, None]

    def randint(low: int, high: int, size: tuple[int, int], device: Any) -> Tensor:
        assert low == 0 and size[0] == 1
        if not state["drawn"]:
            state["canvas"] += 1
            state["step"] = 0
        state["drawn"] = False
        return Noise(seed, state["canvas"]).tokens(state["step"], size[1], high)[None]

    with patch.object(torch, "multinomial", multinomial), patch.object(torch, "randint", randint):
        yield


def reference(
    model: DiffusionGemmaForBlockDiffusion, case: Case, eos: tuple[int, ...]
) -> Trajectory:
    recorded, last_position = Trajectory(), None
    denoise = model._denoising_step

    def spy(**kwargs: Any) -> Any:
        nonlocal last_position
        position = int(kwargs["decoder_position_ids"][0, 0])
        if position != last_position:
            recorded.canvases.append([])
            last_position = position
        result = denoise(**kwargs)
        _, argmax, logits, _ = result
        step = Step(
            kwargs["current_canvas"][0],
            kwargs["sampler"].accepted_token_mask[0],
            argmax[0],
            Categorical(logits=logits[0]).entropy(),
        )
        recorded.canvases[-1].append(step)
        return result

    ids = case.ids()[None]
    with our_noise(case.seed), patch.object(model, "_denoising_step", spy):
        out = model.generate(ids, generation_config=case.theirs(eos))
    recorded.tokens = out.sequences[0, case.prompt :].tolist()
    return recorded


def visible(tokens: list[int], eos: tuple[int, ...], max_tokens: int) -> list[int]:
    """The reference returns whole canvases with the end token and padding: ours is this."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: min(end, max_tokens)]


CASES = [
    Case(seed=0, prompt=5, max_tokens=24),
    Case(seed=1, prompt=13, max_tokens=16, bound=0.5, confidence=0.2),
    Case(seed=2, prompt=1, max_tokens=20, stability=0, confidence=0.5),
    Case(seed=3, prompt=9, max_tokens=16, stability=2, confidence=0.3, max_steps=20),
    Case(seed=4, prompt=7, max_tokens=16, stability=3, confidence=0.3, max_steps=24),
    Case(seed=5, prompt=20, max_tokens=16, bound=5.0, temperatures=(0.9, 1.5)),
    Case(seed=6, prompt=3, max_tokens=8, max_steps=1),
    Case(seed=7, prompt=6, max_tokens=32, confidence=0.3, eos_at=(2, 3), stop_reason="eos"),
    Case(seed=8, prompt=6, max_tokens=16, confidence=0.3, eos_at=(0, 0), stop_reason="eos"),
    Case(seed=9, prompt=6, max_tokens=13, confidence=0.3, eos_at=(1, 7)),  # past the limit
    Case(seed=2**64 - 10, prompt=11, max_tokens=16, temperatures=(0.01, 0.3)),
]


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    return calm_oracle()


@pytest.fixture(scope="module")
def network(model: DiffusionGemmaForBlockDiffusion) -> Network:
    return network_of(model)


@pytest.fixture(scope="module")
def own(network: Network) -> dict[Case, tuple[Trajectory, Outcome, tuple[int, ...]]]:
    """Our replies, and the end ids that they were asked for with."""
    recorded = {}
    for case in CASES:
        eos: tuple[int, ...] = ()
        if case.eos_at is not None:
            canvas, position = case.eos_at
            eos = (int(ours(network, case, ())[0].canvases[canvas][-1].argmax[position]),)
        recorded[case] = (*ours(network, case, eos), eos)
    return recorded


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_every_step_equals_the_reference(
    model: DiffusionGemmaForBlockDiffusion, own: dict[Case, Any], case: Case
) -> None:
    recorded, outcome, eos = own[case]
    expected = reference(model, case, eos)
    for own_canvas, expected_canvas in zip(recorded.canvases, expected.canvases, strict=True):
        for mine, theirs in zip(own_canvas, expected_canvas, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert torch.equal(mine.argmax, theirs.argmax)
            assert torch.equal(mine.accepted, theirs.accepted)
            torch.testing.assert_close(mine.entropy, theirs.entropy, atol=1e-4, rtol=1e-4)
    assert outcome.token_ids == visible(expected.tokens, eos, case.max_tokens)
    assert outcome.stats.steps == [len(steps) for steps in expected.canvases]
    assert outcome.stop_reason == case.stop_reason


def test_the_cases_are_of_every_kind(own: dict[Case, Any], note: Callable[[str], None]) -> None:
    """Early stops and step caps, partial acceptance, positions that are un-accepted."""
    steps, partly, lost, ends, places = [], 0, 0, set(), set()
    for recorded, outcome, eos in own.values():
        steps += outcome.stats.steps
        ends |= set(outcome.stats.convergence)
        if eos:
            places.add((len(recorded.canvases), len(outcome.token_ids) % LENGTH))
        for canvas in recorded.canvases:
            partly += sum(0 < int(step.accepted.sum()) < LENGTH for step in canvas)
            lost += sum(bool((a.accepted & ~b.accepted).any()) for a, b in pairwise(canvas))
    assert ends == {"converged", "step_cap"} and len(set(steps)) > 5
    assert partly > 20 and lost > 5
    assert len(places) > 1
    note(
        f"trajectories equal to transformers' generate: {len(CASES)} replies, {len(steps)} "
        f"canvases, {sum(steps)} steps"
    )


def test_a_cold_reply_equals_an_untouched_generate(
    model: DiffusionGemmaForBlockDiffusion, network: Network
) -> None:
    """Next to temperature 0 only the first canvas is random, and that can be given: nothing of
    the reference need be patched."""
    case = Case(seed=21, prompt=9, max_tokens=LENGTH, temperatures=(1e-4, 2e-4), max_steps=16)
    start = Noise(case.seed, 0).tokens(0, LENGTH, VOCABULARY)
    out = model.generate(
        case.ids()[None], generation_config=case.theirs(()), decoder_input_ids=start[None]
    )
    recorded, _ = ours(network, case, ())
    assert recorded.tokens == out.sequences[0, case.prompt :].tolist()
    assert recorded.tokens != start.tolist()
    assert len(recorded.canvases[0]) > 1
