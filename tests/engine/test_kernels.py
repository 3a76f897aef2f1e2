"""An engine whose steps run in interpreted kernels gives the tokens of the plain step.

Every test asserts, in `serve`, that the kernels were launched, once for each step.  Interpreted, a
position takes a tenth of a second, so canvases have 3, and most tests leave the layers to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.kernels import counted_launches, interpreted, seen_as
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.scripted_engine import run
from tests.support.scripted_model import END_IDS, TEMPLATE, tokenizer

from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.api import TextSide
from sfumato.bench.subject import random_config
from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.sampler import EntropyBound, Never, StableAndConfident
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.diffusion.step.captured import DeviceStep
from sfumato.engine import Handle
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.network import Network
from sfumato.model.transformer import Transformer
from sfumato.ops import registry
from sfumato.ops.triton import OPERATIONS, self_test
from sfumato.text.template import ChatTemplate

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
WIDTH, VOCAB = 3, 64
SAMPLING = frozenset(("step_noise", "vocabulary_pass", "move_rows"))
"""Operations of a step outside of the layers."""
LAUNCHED_ONCE = (
    *("step_noise", "score_chunk", "embed_chunk", "merge_top"),
    *("finish_head", "take_soft", "move_rows"),
)
"""Their kernels, which each step launches once."""
LAYERS = (
    *("linear", "experts_gate_up", "experts_down"),
    *("attention_256", "prepare_heads", "router_choice"),
)
"""Kernels of the layers, among others."""


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    config = DIFFUSION_GEMMA.config.from_hf(random_config("tiny"), {})
    layer = replace(config.layers[0], kv_heads=1, head_dim=16, rope_pairs=8)
    config = replace(config, layers=(layer,), num_heads=2, hidden_size=32, intermediate_size=32)
    config = replace(config, num_experts=2, experts_per_token=1, expert_size=16)
    config = replace(config, vocab_size=VOCAB, canvas_length=WIDTH)
    transformer = Transformer(config).requires_grad_(False)
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    transformer.embed_tokens.weight.mul_(8)  # some tokens are more probable than others
    for parameter in transformer.self_conditioning.parameters():
        parameter.mul_(3)  # what a step leaves changes the tokens of the next one
    network = Network(transformer, torch.device("cpu"), torch.float32, torch.float32, None)
    text = TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=DIFFUSION_GEMMA.markers))
    return Model(network, text, REFERENCE, END_IDS, Path("random"), DIFFUSION_GEMMA)


def request_of(seed: int, **choices: Any) -> Request:
    """A request of 2 steps a canvas; more keywords are the sampler's or the request's."""
    own = {name: choices.pop(name) for name in ("max_tokens", "canvas") if name in choices}
    sampler = SamplerConfig(**({"max_steps": 2, "stopping": Never()} | choices))
    how: dict[str, Any] = {"max_tokens": WIDTH, "retry_empty": False} | own
    return Request(ids=[2, 20 + seed % 7], seed=seed, sampler=sampler, **how)


Play = Callable[[Engine], Sequence[Handle]]
Serve = Callable[..., list[DeviceStep]]


@contextmanager
def counted_steps(patch: pytest.MonkeyPatch) -> Iterator[list[DeviceStep]]:
    """The steps that are run, in their order."""
    steps: list[DeviceStep] = []
    serve = DeviceStep.run
    with patch.context() as own:
        own.setattr(DeviceStep, "run", lambda step: (steps.append(step), serve(step))[1])
        yield steps


@pytest.fixture
def serve(model: Model, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Plays requests on an engine with the kernels of some operations and on one without any, and
    asserts that the replies are the same, and that those kernels, and `more`, were launched.
    Returns the steps of the first engine."""

    def engine() -> Engine:
        return Engine(model, EngineConfig(slots=4, context=64))

    def replies(serving: Engine, play: Play) -> list[tuple[Any, ...]]:
        handles = play(serving)
        run(serving)
        results = [handle.result() for handle in handles]
        return [(each.token_ids, each.stats.steps, each.stats.convergence) for each in results]

    def both(
        play: Play, operations: frozenset[str] = SAMPLING, more: Sequence[str] = ()
    ) -> list[DeviceStep]:
        with registry.reference_only():
            expected = replies(engine(), play)
        monkeypatch.setattr(self_test, "_passed", {torch.device("cpu"): operations})
        monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: RepeatedCalls())
        with seen_as("cpu", "cuda"):
            serving = engine()
            with counted_steps(monkeypatch) as steps, counted_launches() as launches:
                assert replies(serving, play) == expected
        assert steps and {launches[name] for name in LAUNCHED_ONCE} == {len(steps)}
        assert all(launches[name] for name in more)
        return steps

    return both


def together(*requests: Request) -> Play:
    return lambda serving: [serving.submit(each) for each in requests]


@pytest.mark.parametrize("steps", [[2], [1, 1, 1, 1]], ids=["one row", "four rows"])
def test_rows_with_all_kernels(serve: Serve, steps: list[int]) -> None:
    play = together(*(request_of(seed, max_steps=most) for seed, most in enumerate(steps, 1)))
    (first, *_) = serve(play, frozenset(OPERATIONS), LAYERS)
    assert first.rows == len(steps)


SETTLES = StableAndConfident(0, 50.0)
CASES: dict[str, Sequence[Request]] = {
    "temperatures": [request_of(1, temperature=scale) for scale in (0.0, 4.0)],
    "seeds": [request_of(seed) for seed in (2**63 + 5, 7)],
    "acceptance": [request_of(1, sampler=EntropyBound(bound)) for bound in (0.0, 8.0)],
    "one settles": [request_of(1, stopping=SETTLES), request_of(2)],
    "no self-conditioning": [request_of(1, self_conditioning=False)],
    "pinned positions": [
        request_of(1, canvas=GivenCanvas((20, 21, 22), (0, 2)), sampler=EntropyBound(0.0)),
        request_of(2, max_steps=1),
    ],
    "banned tokens": [request_of(1, ignore_eos=True)],
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_differ(serve: Serve, case: str) -> None:
    assert serve(together(*CASES[case]))[0].rows == len(CASES[case])


def test_a_row_joins(serve: Serve) -> None:
    def play(serving: Engine) -> list[Handle]:
        first = serving.submit(request_of(1))
        serving.step()
        return [first, serving.submit(request_of(2, max_steps=1))]

    assert [step.rows for step in serve(play)][:2] == [1, 2]


def test_a_row_leaves(serve: Serve) -> None:
    """The first one, so that the other row moves."""

    def play(serving: Engine) -> list[Handle]:
        first, second = serving.submit(request_of(1)), serving.submit(request_of(2))
        serving.step()
        first.cancel()
        return [second]

    assert {step.rows for step in serve(play)} == {1, 2}


def test_a_commit_beside_rows_that_are_denoised(serve: Serve) -> None:
    two = {"max_tokens": 2 * WIDTH, "ignore_eos": True}
    play = together(request_of(1, max_steps=1, **two), request_of(2, max_steps=3))
    operations = SAMPLING | {"attend_padded", "write_cache"}
    steps = serve(play, operations, ("attention_256", "write_cache"))
    assert any(step.kind.commits and step.rows == 2 for step in steps)
