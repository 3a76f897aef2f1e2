"""Networks of blocks do what every network does: replies, constraints, fills, decisions and vectors
are the same alone and beside others, from prompts that end anywhere in a block."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked
from tests.support.scripted_engine import run
from tests.support.tiny_checkpoint import save_tiny_blocks

import sfumato
from sfumato import (
    Choice,
    Engine,
    EngineConfig,
    Hole,
    Model,
    Request,
    SamplerConfig,
    YesNo,
)
from sfumato.api import Reply
from sfumato.decisions.schema import schema_of
from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.causal import log_likelihoods, masked_log_likelihoods
from sfumato.diffusion.constraints.grammar import GrammarSource
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Finished
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.engine.request import DecisionRequest
from sfumato.model.families.qwen3_blocks import BD3LM, SDAR
from sfumato.tasks.alone import alone, finish
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.wants import Pooling, PromptScoring

KINDS = {"sdar": (SDAR, "front", 4), "bd3lm": (BD3LM, "back", 16)}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 22]}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
PROMPTS = [f"Say {'x' * n}" for n in range(5)]  # of five lengths: they end anywhere in a block of 4


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("blocks") / request.param
    return sfumato.load(save_tiny_blocks(folder, *KINDS[request.param]), device="cpu")


def engine(model: Model, **config: Any) -> Engine:
    return Engine(
        model, EngineConfig(**({"slots": 3, "context": 256, "prefill_chunk": 24} | config))
    )


def by_itself(model: Model, request: Request) -> Reply:
    """The reply of the plain driver to what the engine is asked."""
    points = snapshot_points_of(model)
    reply: Reply = finish(alone(model.network, prepare(model, request, 256, points).task))
    return reply


def finished(handle: Any) -> Finished:
    *_, end = handle.events()
    assert isinstance(end, Finished), end
    return end


def test_replies_are_the_same_alone_and_beside_others(model: Model) -> None:
    samplers = [None, SamplerConfig(temperature=0), SamplerConfig(min_tokens=9), None, None]
    options = [
        {"max_tokens": count, "seed": count, "sampler": sampler, "stop": stop}
        for count, sampler, stop in zip(
            (1, 6, 17, 40, 33), samplers, [*["q"] * 3, None, None], strict=True
        )
    ]
    serving = engine(model)
    handles = [serving.submit(Request(p, **o)) for p, o in zip(PROMPTS, options, strict=True)]
    run(serving)
    for prompt, option, handle in zip(PROMPTS, options, handles, strict=True):
        expected, reply = by_itself(model, Request(prompt, **option)), finished(handle).reply
        assert (reply.token_ids, reply.stop_reason) == (expected.token_ids, expected.stop_reason)
        assert reply.stats.steps == expected.stats.steps
        assert len(reply.token_ids) <= option["max_tokens"]
        account = handle.terminal.account
        assert account.prompt_tokens == len(model.prompt_ids(prompt)) == reply.stats.prompt_tokens
        if option["sampler"] is samplers[2] and reply.stop_reason == "eos":
            assert len(reply.token_ids) >= 9
    assert no_slot_is_leaked(serving)


def test_drafts_are_of_the_reply_alone(model: Model) -> None:
    """The first canvas begins with the prompt's last tokens, which no draft shows."""
    block = model.config.canvas_length
    for prompt in PROMPTS:
        count = len(model.prompt_ids(prompt))
        *drafts, settled, _ = list(model.stream(prompt, max_tokens=1))
        opened = count - model.config.blocks(count).border(count)
        assert opened == (count % block if model.family is SDAR else 0)
        width = block - opened if model.family is SDAR else 1  # as the limit of the reply
        assert all(len(draft.token_ids) == width for draft in drafts)
        assert settled.token_ids == drafts[-1].token_ids[:1].tolist()[: len(settled.token_ids)]


def test_a_canvas_ends_with_what_the_reply_takes_of_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the tokens up to an end token, or to the limit, are revealed, they stay. The last canvas
    of BD3LM has no more positions than the limit leaves."""
    block, steps = model.config.canvas_length, [0, 0]
    for seed, prompt in enumerate(PROMPTS[:3]):
        *drafts, _, done = list(model.stream(prompt, max_tokens=block + 2, seed=seed))
        assert len(drafts[-1].token_ids) == (block if model.family is SDAR else 2)
        reply = done.reply
        with monkeypatch.context() as patch:
            patch.setattr(ReplyTask, "_revealed", lambda *given: None)
            unshortened = model.generate(prompt, max_tokens=block + 2, seed=seed)
        assert (unshortened.token_ids, unshortened.stop_reason) == (
            reply.token_ids,
            reply.stop_reason,
        )
        for at, each in enumerate((reply, unshortened)):
            steps[at] += sum(each.stats.steps)
    assert steps[0] <= steps[1] - (model.family is SDAR)


def test_the_next_turn_finds_the_blocks_of_the_one_before(model: Model) -> None:
    messages = [{"role": "user", "content": "Who are you, and what is it that you do all day?"}]
    serving = engine(model)
    first = serving.submit(Request(messages=messages, max_tokens=12, seed=1))
    run(serving)
    answer = {"role": "assistant", "content": finished(first).reply.text}
    for more in ("a", "ab", "abc", "abcd"):  # blocks from the back agree for one length alone
        messages = [*messages[:1], answer, {"role": "user", "content": more}]
        request = Request(messages=messages, max_tokens=24, seed=2)
        second = serving.submit(request)
        run(serving)
        end = finished(second)
        assert end.reply.token_ids == by_itself(model, request).token_ids
        block = model.config.canvas_length
        if model.family is SDAR:
            assert end.account.cached_tokens >= 48 and end.account.cached_tokens % block == 0


def test_a_schema_is_kept_alone_and_beside_others(model: Model) -> None:
    serving = engine(model)
    requests = [
        Request(p, max_tokens=60, seed=n, grammar=GrammarSource("schema", json.dumps(SCHEMA)))
        for n, p in enumerate(PROMPTS[:3])
    ]
    handles = [serving.submit(request) for request in requests]
    run(serving)
    for n, handle in enumerate(handles):
        reply = finished(handle).reply
        value = json.loads(reply.text)
        assert set(value) == {"a", "n"} and value["n"] in (1, 22) and len(value["a"]) <= 5
        assert by_itself(model, requests[n]).token_ids == reply.token_ids
        assert reply.stats.constraint is not None and not reply.stats.constraint.causal_tokens
        # Each guided step knows one token more; before these there are a canvas's free steps.
        most = 2 * model.config.canvas_length
        assert all(steps <= most for steps in reply.stats.steps), reply.stats.steps


def test_fills_are_the_same_alone_and_in_the_engine(model: Model) -> None:
    """A canvas of a fill ends with its block: behind a prompt, one of 4 has room for few tokens."""
    small = model.config.canvas_length == 4
    tried: list[Any] = [Hole(1), Hole(choices=("a", "b"))] if small else [Hole(3), Hole(at_most=4)]
    serving, messages = engine(model), [{"role": "user", "content": "Say"}]
    bare = {"ids": model.fills.no_prompt}  # of a vocabulary without a token to begin with, empty
    for hole, given in product(tried, ({"messages": messages}, bare)):
        parts = ["It is ", hole]
        handle = serving.submit(Request(**given, parts=parts, seed=2))
        run(serving)
        plain = model.fill(parts, messages=given.get("messages"), seed=2)
        reply = finished(handle).reply
        assert reply.filled is not None
        assert (reply.filled.text, reply.filled.holes) == (plain.text, plain.holes)
        assert plain.text.startswith("It is ") and len(plain.text) > 6
    with pytest.raises(ValueError, match="parts: the holes"):
        model.fill(["It is ", Hole(40)], messages=messages)


def test_the_likelihood_is_that_of_masks_revealed_from_left_to_right(model: Model) -> None:
    network, mask = model.network, model.config.mask_id
    slot, ids = network.new_slot(64), torch.tensor([30, 31, 32, 33])
    slot.offset = 0
    network.encode([torch.arange(40, 40 + 32)], [slot])
    scores = masked_log_likelihoods(network, slot, ids, 1)
    for at, score in zip(range(1, 4), scores.tolist(), strict=True):
        canvas = torch.full((model.config.canvas_length,), mask)
        canvas[:at] = ids[:at]
        logits = network.head.logits(network.denoise([canvas], [slot]))[at]
        assert score == pytest.approx(float(logits.log_softmax(0)[ids[at]]), abs=1e-4)
    with pytest.raises(ValueError, match="causal mode"):
        log_likelihoods(network, slot, ids)


def test_decisions_are_the_same_alone_and_beside_others(model: Model) -> None:
    questions = {"good": YesNo("Is it good?"), "color": Choice(["red", "blue", "green"])}
    states = ["It is good.", "It is not good at all.", "x"]
    serving, typed = engine(model), schema_of(questions).questions
    handles = [serving.decide(DecisionRequest(state, typed)) for state in states]
    run(serving)
    for state, handle in zip(states, handles, strict=True):
        *_, end = handle.events()
        decided = model.decide(state, questions)
        for name, answer in end.answers.items():
            assert answer.probabilities == tuple(decided[name].probabilities.values())
            assert sum(answer.probabilities) == pytest.approx(1)
    with pytest.raises(ValueError, match="steps: is 2"):
        model.decide("x", questions, steps=2)


def test_vectors_do_not_depend_on_company(model: Model) -> None:
    serving = engine(model)
    given = {"max_tokens": 0, "pooling": Pooling("mean")}
    handles = [serving.submit(Request(p, **given)) for p in PROMPTS[:3]]
    run(serving)
    again = engine(model)
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        single = again.submit(Request(prompt, **given))
        run(again)
        vector = finished(handle).vector  # whose sum rounds by the pieces of the prompt
        assert vector is not None and torch.allclose(vector, finished(single).vector, atol=1e-5)


def test_what_needs_a_causal_mode_is_refused(model: Model) -> None:
    sampler = SamplerConfig(mode="causal")
    for field, given in {
        "mode": {"sampler": sampler},
        "prediction": {"prediction": PredictedText("It is good.")},
        "canvas_length": {"sampler": SamplerConfig(canvas_length=2)},
    }.items():
        with pytest.raises(ValueError, match=f"^{field}: "):
            model.generate("Hi", **given)
    serving = engine(model)
    with pytest.raises(ValueError, match="scoring: needs a causal mode"):
        serving.submit(Request("Hi", max_tokens=0, scoring=PromptScoring()))


def test_a_given_canvas_stands_behind_the_prompt(model: Model) -> None:
    serving, prompt = engine(model), PROMPTS[1]
    count = len(model.prompt_ids(prompt))
    width = model.config.canvas_length - (count - model.config.blocks(count).border(count))
    tokens = (50, *[model.config.mask_id] * (width - 1))
    given = GivenCanvas(tokens, pinned=(0,))
    handle = serving.submit(Request(prompt, max_tokens=width, canvas=given))
    run(serving)
    assert finished(handle).reply.token_ids[:1] == [50]
    read_only = GivenCanvas(tokens, pinned=(0,), read_only=True)
    handle = serving.submit(Request(prompt, max_tokens=64, canvas=read_only))
    run(serving)
    reply = finished(handle).reply
    assert len(reply.token_ids) == width and reply.stats.canvases == 1
    with pytest.raises(ValueError, match=f"the canvas has {width} positions"):
        serving.submit(Request(prompt, canvas=GivenCanvas((*tokens, 50))))


def test_a_request_ends_anywhere(model: Model) -> None:
    """Cancelled in its first canvas, and later: what has settled stays."""
    reply_ids = by_itself(model, Request("tell me", max_tokens=60, seed=3)).token_ids
    for steps in (2, 9):
        serving = engine(model)
        handle = serving.submit(Request("tell me", max_tokens=60, seed=3))
        for _ in range(steps):
            serving.step()
        handle.cancel()
        run(serving)
        reply = finished(handle).reply
        assert reply.stop_reason == "cancelled" and len(reply.token_ids) < len(reply_ids)
        assert reply.token_ids == reply_ids[: len(reply.token_ids)] and no_slot_is_leaked(serving)
