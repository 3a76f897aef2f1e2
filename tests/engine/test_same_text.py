"""The engine says what the plain loop says, alone and in any company: on the embedded model."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.support.scripted_engine import run

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.api import Reply
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import FixedCount, LogitBias, Threshold
from sfumato.engine import Draft, Event, Finished, Settled
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.tasks.alone import alone

PROMPTS = (
    "Who are you?",
    "What is the capital of France?",
    "How do you work?",
    "What is the meaning of life?",
    "name a color",
    "tell me everything you know about the sea and the ships on it, and do not stop",
)
SAMPLERS = (
    None,
    SamplerConfig(max_steps=3),
    SamplerConfig(temperature=0, max_steps=8),
    SamplerConfig(sampler=FixedCount(4), max_steps=8),
    SamplerConfig(sampler=Threshold(0.8), canvas_length=16, max_steps=8),
    SamplerConfig(top_k=3, top_p=0.9, max_steps=6),
    SamplerConfig(processors=(LogitBias({40: 5.0}),), max_steps=5),
    SamplerConfig(ignore_eos=True, max_steps=4),
    SamplerConfig(min_tokens=12, max_steps=9),
    SamplerConfig(self_conditioning=False, max_steps=4),
)


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu")


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Each of another sampler."""
    chosen = random.Random(seed)
    return [
        {
            "prompt": chosen.choice(PROMPTS),
            "seed": chosen.randrange(2**64),
            "sampler": sampler,
            "max_tokens": chosen.choice([1, 10, 32, 33, 40]),
            "stop": chosen.choice([None, "a", ["the", " is"]]),
        }
        for sampler in chosen.sample(SAMPLERS, count)
    ]


def same(one: Any, other: Any) -> bool:
    fields = ("text", "thought", "token_ids", "stop_reason", "warnings", "tool_calls")
    figures = ("steps", "convergence", "canvases", "prompt_tokens", "output_tokens")
    return all(getattr(one, f) == getattr(other, f) for f in fields) and all(
        getattr(one.stats, f) == getattr(other.stats, f) for f in figures
    )


@pytest.mark.parametrize("lengths", [(16, 32, 32), (32, 5, 1)])
def test_no_row_rounds_by_its_neighbours(model: Model, lengths: tuple[int, ...]) -> None:
    """Bit for bit: a trajectory can hang on the last one."""
    network, vocabulary = model.network, model.config.vocab_size
    slots = []
    for prompt, _ in zip(PROMPTS, lengths, strict=False):
        slots.append(network.new_slot(256))
        network.encode([torch.tensor(model.prompt_ids(prompt))], slots[-1:])
    for seed in range(3):
        canvases = [Noise(seed + n, n).tokens(0, n, vocabulary) for n in lengths]
        softs = [torch.randn(n, model.config.hidden_size) for n in lengths]
        together = network.denoise(canvases, slots, softs).split(lengths)
        for canvas, slot, soft, results in zip(canvases, slots, softs, together, strict=True):
            assert torch.equal(network.denoise([canvas], [slot], [soft]), results)


Expected = list[tuple[dict[str, Any], Reply]]


def with_replies(model: Model, wanted: list[dict[str, Any]]) -> Expected:
    """The plain loop's."""
    return [(each, model.generate(**each)) for each in wanted]


@pytest.fixture(scope="module")
def expected(model: Model) -> Expected:
    """Of each sampler a request."""
    return with_replies(model, requests(len(SAMPLERS), seed=1))


def test_alone(model: Model, expected: Expected) -> None:
    serving = Engine(model, EngineConfig(slots=1, context=512))
    for wanted, reply in expected[:4]:
        assert same(serving.generate(Request(**wanted, retry_empty=False)), reply), wanted


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_in_mixed_batches(model: Model, expected: Expected, seed: int) -> None:
    """Different prompts, samplers, seeds, stops and lengths, arriving at different steps, with
    prompts in small chunks and slots that hold what others left."""
    serving = Engine(model, EngineConfig(slots=5, context=256, prefill_chunk=24))
    chosen = random.Random(seed)
    if seed > 1:
        expected = with_replies(model, requests(len(SAMPLERS), seed))
    handles = []
    for each, _ in expected:
        handles.append(serving.submit(Request(**each, retry_empty=False, drafts=True)))
        for _ in range(chosen.randrange(3)):
            serving.step()
    run(serving)
    batched = serving.state().totals
    assert batched.steps > 1.3 * batched.forwards, "rows were seldom together"
    for (each, reply), handle in zip(expected, handles, strict=True):
        assert same(handle.result(), reply), each


def test_from_many_threads(model: Model, expected: Expected) -> None:
    serving = Engine(model, EngineConfig(slots=3, context=256)).start()

    def events(each: dict[str, Any]) -> list[Event]:
        return list(serving.submit(Request(**each, retry_empty=False)).events())

    try:
        with ThreadPoolExecutor(6) as clients:
            results = list(clients.map(events, [wanted for wanted, _ in expected[4:]]))
    finally:
        serving.close()
    for (_, reply), (*others, last) in zip(expected[4:], results, strict=True):
        assert isinstance(last, Finished) and all(isinstance(e, Settled) for e in others)
        assert same(last.reply, reply)


def test_messages_and_ids_are_the_same_prompt(model: Model) -> None:
    serving = Engine(model, EngineConfig(slots=2, context=512))
    messages = [{"role": "user", "content": PROMPTS[1]}]
    ids = model.prompt_ids(PROMPTS[1])
    replies = [
        serving.generate(Request(seed=3, **{name: value}))
        for name, value in (("prompt", PROMPTS[1]), ("messages", messages), ("ids", ids))
    ]
    assert [reply.text for reply in replies] == [model.generate(PROMPTS[1], seed=3).text] * 3


@pytest.mark.parametrize("opening", ["The town", "y" * 40])
def test_an_opening_is_what_the_reply_begins_with(model: Model, opening: str) -> None:
    """Also one that is longer than a canvas."""
    serving = Engine(model, EngineConfig(slots=1, context=512))
    reply = serving.generate(Request(PROMPTS[1], seed=1, opening=opening, max_tokens=90))
    assert reply.text.startswith(opening) and reply.stop_reason == "eos"
    assert reply.token_ids[: len(opening)] == model.tokenizer.encode(opening)


def test_an_answer_that_would_be_empty_may_not_end_at_last(model: Model) -> None:
    """With a bias for the end token every draw is empty, until ends are banned."""
    end = model.tokenizer.token_id("<turn|>")
    assert end is not None
    eager = SamplerConfig(processors=(LogitBias({end: 100.0}),), max_steps=8)
    serving = Engine(model, EngineConfig(slots=1, context=512))
    wanted: dict[str, Any] = {"prompt": PROMPTS[0], "seed": 1, "sampler": eager}
    empty = serving.generate(Request(**wanted, retry_empty=False))
    assert empty.text == model.generate(**wanted).text == "" and empty.warnings == ()
    handle = serving.submit(Request(**wanted))
    run(serving)
    reply = handle.result()
    assert len(reply.token_ids) == 1 and reply.text
    assert reply.warnings == ("canvas 0: the answer was empty and was drawn again",)
    assert isinstance(handle.terminal, Finished)
    account = handle.terminal.account
    assert (account.retries, account.canvas_tokens) == (2, 3 * 32)
    assert len(account.steps) == 1 and sum(account.steps) >= 6


THOUGHT = "<|channel>thought\nThe sea is"


def by_the_loop(model: Model, request: Request) -> tuple[Reply, list[Draft]]:
    """The reply that the plain loop gives under the policies and the opening of a request."""
    limit = model.config.context_length
    job = prepare(model, request, limit, snapshot_points_of(model))
    steps = alone(model.network, job.task)
    drafts: list[Draft] = []
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            return end.value, drafts
        if isinstance(event, Draft):
            drafts.append(event)


def test_openings_retries_and_thinking_cuts_in_mixed_batches(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the loop has them, bit for bit at every step. The ids of a canvas come from its last
    draft: its state is not read from the device once more."""
    monkeypatch.setattr(Canvas, "history", None)
    end = model.tokenizer.token_id("<turn|>")
    assert end is not None
    eager = SamplerConfig(processors=(LogitBias({end: 100.0}),), max_steps=4)
    thinks: dict[str, Any] = {"opening": THOUGHT, "thinking": True}
    special: list[dict[str, Any]] = [
        {"sampler": eager, "stop": None},
        {"opening": "y" * 40, "max_tokens": 90},
        thinks | {"max_tokens": 90, "max_thinking_tokens": 13},
        thinks | {"max_tokens": 70, "sampler": SamplerConfig(ignore_eos=True, max_steps=4)},
        thinks | {"max_tokens": 90, "max_thinking_tokens": 13, "sampler": eager, "stop": None},
        {"opening": "The town", "max_tokens": 33, "sampler": eager},
    ]
    few_steps = {"sampler": SamplerConfig(max_steps=6)}
    fields = [each | few_steps | more for each, more in zip(requests(6, 5), special, strict=True)]
    mixture = [Request(**each, drafts=True) for each in (*fields, *requests(2, seed=6))]
    serving = Engine(model, EngineConfig(slots=4, context=256, prefill_chunk=24))
    events: list[list[Event]] = [[] for _ in mixture]
    handles = []
    for request, received in zip(mixture, events, strict=True):
        handles.append(serving.submit(request, received.append))
        serving.step()
    run(serving)
    warnings: list[str] = []
    for request, handle, received in zip(mixture, handles, events, strict=True):
        reply, drafts = by_the_loop(model, request)
        assert same(handle.result(), reply), request
        batched = [event for event in received if isinstance(event, Draft)]
        assert len(batched) == len(drafts)
        for one, other in zip(batched, drafts, strict=True):
            assert torch.equal(one.token_ids, other.token_ids), request
            assert torch.equal(one.entropy, other.entropy), request
        warnings += reply.warnings
    for rule in ("was drawn again", "thought was ended"):
        assert sum(rule in warning for warning in warnings) >= 2, warnings
