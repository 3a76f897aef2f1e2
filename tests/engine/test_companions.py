"""The same seed is the same text, bit for bit, whatever a request is served with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from tests.support.scripted_engine import run
from tests.support.shallow_model import shallow_checkpoint
from torch import Tensor

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.diffusion.sampler import EntropyBound, LogitBias, StepView
from sfumato.engine import Settled
from sfumato.ops.cpu import library

BANNED = float("-inf")


class WantsLogits(EntropyBound):
    needs_logits: ClassVar[bool] = True

    def accept(self, view: StepView) -> Tensor:
        assert view.stats.logits is not None
        return super().accept(view)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short canvas": {"canvas_length": 5},
    "cold": {"temperature": 0.3},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 20},
    "bans": {"processors": (LogitBias({40: BANNED, 41: BANNED}),)},
    "biased": {"processors": (LogitBias({40: 3.0, 41: BANNED}),)},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "both": {"top_k": 60, "top_p": 0.9, "canvas_length": 16},
    "soft_top_k": {"soft_top_k": 9},
    "one of soft_top_k": {"soft_top_k": 3, "ignore_eos": True},
    "soft_skip": {"soft_skip": 0.2},
    "logits": {"sampler": WantsLogits(0.1)},
    "more named": {"top_tokens": 20},
}
PROMPTS = ("Who are you?", "name a color", "tell me all about the sea and its ships. " * 5)


@contextmanager
def torch_alone() -> Iterator[None]:
    before, library.kernels = library.kernels, None
    try:
        yield
    finally:
        library.kernels = before


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


def request_fields(number: int, kind: str) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "seed": 100 + number,
        "sampler": SamplerConfig(max_steps=2, **KINDS[kind]),  # the second one has a soft embedding
        "max_tokens": 34,
        "retry_empty": False,
        "drafts": True,
    }


def visible_steps(
    model: Model, layout: EngineConfig, wanted: list[dict[str, Any]], gaps: list[int]
) -> Any:
    """Of each request all that a client can see of its steps."""
    serving = Engine(model, layout)
    handles = []
    for each, gap in zip(wanted, gaps, strict=True):
        handles.append(serving.submit(Request(**each)))
        for _ in range(gap):
            serving.step()
    run(serving)
    return [_seen(handle) for handle in handles]


def _seen(handle: Any) -> tuple[str, list[list[float]]]:
    numbers = []
    for event in list(handle.events())[:-1]:
        assert event.top_probs is not None
        numbers.append(event.top_probs.flatten().tolist())
        if not isinstance(event, Settled):
            numbers.append(event.entropy.tolist())
    return handle.result().text, numbers


@pytest.mark.parametrize(
    ("load", "backend", "kinds"),
    [
        pytest.param({"dtype": "float32"}, as_it_is, [*KINDS], id="float32"),
        pytest.param({"dtype": "float32"}, torch_alone, [*KINDS][::2], id="float32 by torch"),
        pytest.param({"dtype": "bfloat16"}, as_it_is, [*KINDS][::2], id="bfloat16"),
        pytest.param({"dtype": "bfloat16"}, torch_alone, [*KINDS][1::2], id="bfloat16 by torch"),
        pytest.param({"quantize": "q8_0"}, as_it_is, [*KINDS][1::2], id="int8"),
    ],
)
def test_the_same_seed_is_the_same_text(
    load: dict[str, Any], backend: Callable[[], Any], kinds: list[str]
) -> None:
    """Text, entropies and probabilities of every step, alone and in any mix of companions, with
    prompts in any chunks and rows that arrive at any step."""
    with backend():
        model = sfumato.load(shallow_checkpoint(), device="cpu", **load)
        wanted = [request_fields(number, kind) for number, kind in enumerate(kinds)]
        one_slot = EngineConfig(slots=1, context=1024)
        alone = visible_steps(model, one_slot, wanted, [0] * len(wanted))
        chosen = random.Random(1)
        order = chosen.sample(range(len(wanted)), len(wanted))
        gaps = [chosen.choice((0, 0, 1, 2)) for _ in order]
        layout = EngineConfig(slots=12, context=1024, prefill_chunk=200)
        mixed = visible_steps(model, layout, [wanted[i] for i in order], gaps)
        for i, visible in zip(order, mixed, strict=True):
            assert visible == alone[i], kinds[i]


def test_a_long_prompt_is_the_same_in_chunks_of_any_size() -> None:
    model = sfumato.load(shallow_checkpoint(), device="cpu", dtype="float32")
    wanted = [
        request_fields(0, "plain") | {"prompt": "tell me all about the sea and its ships. " * 40}
    ]
    assert len(model.prompt_ids(wanted[0]["prompt"])) > 1100
    visible = [
        visible_steps(model, EngineConfig(slots=1, context=2048, prefill_chunk=chunk), wanted, [0])
        for chunk in (37, 300)
    ]
    assert visible[0] == visible[1]
