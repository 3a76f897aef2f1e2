"""Every family does what Sfumato does: files of both kinds, chats, replies alone and beside others,
schemas, fills, decisions, the server. On an untrained checkpoint of each, and on the models that
the package has. A family that has no entry in `TINY` fails here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.engine.faults import no_slot_is_leaked
from tests.support.scripted_engine import run
from tests.support.tiny_checkpoint import TINY, save_tiny_checkpoint

import sfumato
from sfumato import (
    Choice,
    Done,
    Draft,
    Engine,
    EngineConfig,
    Hole,
    Model,
    Request,
    SamplerConfig,
    Settled,
    YesNo,
)
from sfumato.api import Reply
from sfumato.catalog import PACKAGED
from sfumato.cli import main
from sfumato.convert import convert
from sfumato.decisions.schema import schema_of
from sfumato.diffusion.causal import log_likelihoods
from sfumato.diffusion.constraints.grammar import GrammarSource
from sfumato.engine import Finished
from sfumato.engine.memory.estimate import ModelFootprint, predict
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.engine.request import DecisionRequest
from sfumato.model.cache import slot_bytes
from sfumato.model.families import FAMILIES, open_checkpoint
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.models import Models
from sfumato.server.replay import Recorder
from sfumato.tasks.alone import alone, finish
from sfumato.tasks.wants import Pooling, PromptScoring

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}},
    "required": ["n"],
    "additionalProperties": False,
}
PROMPTS = [f"Say {'x' * n}" for n in range(4)]  # of four lengths: they end anywhere in a block of 4
CHAT = [
    {"role": "user", "content": "Who are you, and what is it that you do all day?"},
    {"role": "assistant", "content": "I am a model."},
    {"role": "user", "content": "And then?"},
]
FAST = SamplerConfig(max_steps=2)
HOT = SamplerConfig(max_steps=2, temperature=3.0, ignore_eos=True)
LAYOUT = EngineConfig(slots=3, context=256, prefill_chunk=24)


NAMES = [family.name for family in FAMILIES]
untrained = pytest.mark.parametrize("path", NAMES, indirect=True)
"""Not of the packaged models: suites of their own ask the first one."""


@pytest.fixture(scope="module", params=[*NAMES, *PACKAGED])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (packaged := PACKAGED.get(request.param)) is not None:
        return packaged
    (family,) = (family for family in FAMILIES if family.name == request.param)
    return save_tiny_checkpoint(tmp_path_factory.mktemp("family") / family.name, family)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path)


def load(path: Path) -> Model:
    return sfumato.load(path, device="cpu", dtype="float32")


def by_itself(model: Model, request: Request) -> Reply:
    """The reply of the plain driver to what the engine is asked."""
    points = snapshot_points_of(model)
    reply: Reply = finish(alone(model.network, prepare(model, request, 256, points).task))
    return reply


def finished(handle: Any) -> Finished:
    *_, end = handle.events()
    assert isinstance(end, Finished), end
    return end


def logits(model: Model) -> torch.Tensor:
    """Scores float32 [canvas, vocab] behind a prompt."""
    slot, ids = model.network.new_slot(64), torch.tensor(model.prompt_ids("Hi"))
    slot.offset = model.config.blocks(len(ids)).offset
    model.network.encode([ids], [slot])
    canvas = 20 + torch.arange(model.config.canvas_length)
    return model.network.head.logits(model.network.denoise([canvas], [slot]))


def test_a_file_of_either_kind_is_the_same_model(
    model: Model, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file, and the folder that is made of it: scores to the bit, ends, defaults, prompts,
    every tensor; and what `inspect` predicts that the weights take. A narrow file is near."""
    done = convert(path, tmp_path / "x.gguf", "bf16")
    towers = [note for note in done.notes if "tensors of the vision tower are left out" in note]
    assert len(towers) == len(done.notes) == (not model.config.design.borders)
    convert(tmp_path / "x.gguf", tmp_path / "back")
    files, expected = (path, tmp_path / "x.gguf", tmp_path / "back"), logits(model)
    for file, each in zip(files, (model, *map(load, files[1:])), strict=True):
        assert each.family is model.family
        assert set(each.end_ids) == set(model.end_ids)
        assert torch.equal(logits(each), expected)
        assert each.prompt_ids(messages=CHAT) == model.prompt_ids(messages=CHAT)
        assert main(["inspect", str(file), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["runs"] and facts["config"]["canvas_length"] == model.config.canvas_length
        tower = facts["memory"]["vision_tower"] if each.network.tower else 0  # an untrained one
        weights = ModelFootprint.of_network(each.network).weights
        assert facts["memory"]["weights"] + tower == weights
        context = str(model.config.context_length)
        slot = slot_bytes(model.config, int(context), each.network.cache_dtype)
        assert facts["memory"]["kv_cache"][context] == slot
        if file.is_dir():  # a GGUF file has float32
            assert each.sampler_defaults == model.sampler_defaults
    same, other = open_checkpoint(path), open_checkpoint(files[2])
    assert same.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(same.read(name), other.read(name)) for name in same.tensors)
    convert(path, tmp_path / "narrow.gguf", "q8_0")
    narrow = logits(load(tmp_path / "narrow.gguf"))
    off = (narrow - expected).norm() / expected.norm()
    assert 0 < off < (0.7 if model.config.num_experts else 0.1)  # some rows get other experts


def test_a_conversation_has_turns_and_goes_on(model: Model) -> None:
    def shown(ids: list[int]) -> str:
        return model.tokenizer.decode(ids, skip_special=False)

    first, turns = (model.prompt_ids(messages=CHAT[:n]) for n in (1, 3))
    markers = model.family.markers
    assert shown(first).count(markers.turn_open) == 2  # the user's, and the reply's
    assert turns[: len(first)] == first and CHAT[1]["content"] in shown(turns[len(first) :])
    assert shown(turns).count(markers.turn_open) == 4
    assert shown(turns).count(markers.turn_close) == 3
    ends = {model.tokenizer.token_id(text) for text in markers.end_tokens}
    assert ends & set(model.end_ids)


def test_a_stream_is_the_reply_and_its_replay(
    model: Model, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a seed, 0 where none is given, is the same reply again, another seed another one; `run`
    prints the reply."""
    how: dict[str, Any] = {"max_tokens": 17, "sampler": HOT}
    reply, other = (model.generate("Hi", seed=seed, **how) for seed in (0, 2**64 - 1))
    assert other.token_ids != reply.token_ids
    torch.manual_seed(1)  # torch's own generator has no say
    *events, done = model.stream("Hi", **how)
    assert isinstance(done, Done) and replace(done.reply, stats=reply.stats) == reply
    drafts = [event for event in events if isinstance(event, Draft)]
    settled = [event for event in events if isinstance(event, Settled)]
    assert [i for each in settled for i in each.token_ids] == reply.token_ids
    assert "".join(each.text for each in settled) == reply.text
    assert len(drafts) == sum(reply.stats.steps) and len(settled) == reply.stats.canvases
    recorder = Recorder(model.tokenizer.token_text, model.family.markers)
    for event in events:
        (recorder.draft if isinstance(event, Draft) else recorder.settled)(event)  # type: ignore
    data = recorder.data(model.path.name, "Hi", reply.text, [])
    for canvas, each in zip(data["canvases"], settled, strict=True):
        pieces = [data["texts"][number] for number in canvas["settled"]]
        assert pieces == [model.tokenizer.token_text(token) for token in each.token_ids]
    assert sum(len(canvas["drafts"]) for canvas in data["canvases"]) == len(drafts)
    options = "--json --dtype float32 --max-tokens 5 --steps 2 --seed 1"
    assert main(["run", "Hi", "-m", str(path), *options.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    reply = model.generate("Hi", max_tokens=5, seed=1, sampler=FAST)
    assert (answer["text"], answer["stats"]["steps"]) == (reply.text, reply.stats.steps)


@untrained
def test_replies_are_the_same_alone_and_beside_others(model: Model) -> None:
    long = replace(FAST, min_tokens=9)
    options: list[dict[str, Any]] = [
        {"max_tokens": 1, "seed": 1, "sampler": FAST, "stop": "q"},
        {"max_tokens": 6, "seed": 6, "sampler": replace(FAST, temperature=0), "stop": "q"},
        {"max_tokens": 12, "seed": 12, "sampler": long},
        {"max_tokens": 20, "seed": 20, "sampler": FAST},
    ]
    serving = Engine(model, LAYOUT)
    handles = [serving.submit(Request(p, **o)) for p, o in zip(PROMPTS, options, strict=True)]
    run(serving)
    for prompt, option, handle in zip(PROMPTS, options, handles, strict=True):
        expected, reply = by_itself(model, Request(prompt, **option)), finished(handle).reply
        assert (reply.token_ids, reply.stop_reason) == (expected.token_ids, expected.stop_reason)
        assert reply.stats.steps == expected.stats.steps
        assert len(reply.token_ids) <= option["max_tokens"]
        account = handle.terminal.account
        assert account.prompt_tokens == len(model.prompt_ids(prompt)) == reply.stats.prompt_tokens
        if option["sampler"] is long and reply.stop_reason == "eos":
            assert len(reply.token_ids) >= 9
    assert no_slot_is_leaked(serving)


@untrained
def test_a_prefix_that_a_slot_holds_changes_no_reply(model: Model) -> None:
    """The next turn, of any length; and the same prompt once more, which no family encodes again
    from the first token."""
    serving, cached = Engine(model, LAYOUT), []
    for more in ("a", "abc", "abc"):
        messages = [*CHAT[:2], {"role": "user", "content": more}]
        request = Request(messages=messages, max_tokens=5, seed=2, sampler=FAST)
        handle = serving.submit(request)
        run(serving)
        end = finished(handle)
        assert end.reply.token_ids == by_itself(model, request).token_ids
        cached.append(end.account.cached_tokens)
        borders = model.config.blocks(len(model.prompt_ids(messages=messages)))
        assert borders.border(cached[-1]) == cached[-1]
    assert cached[0] == 0 < cached[-1]
    assert model.config.design.borders == "back" or min(cached[1:]) >= 48


@untrained
def test_a_schema_is_kept_alone_and_beside_others(model: Model) -> None:
    serving = Engine(model, LAYOUT)
    grammar = GrammarSource("schema", json.dumps(SCHEMA))
    requests = [
        Request(prompt, max_tokens=24, seed=number, grammar=grammar, sampler=FAST)
        for number, prompt in enumerate(PROMPTS[:2])
    ]
    handles = [serving.submit(request) for request in requests]
    run(serving)
    replies = [finished(handle).reply for handle in handles]
    for reply in replies:
        value = json.loads(reply.text)
        assert value in ({"n": 1}, {"n": 22})
        assert reply.stats.constraint is not None
        if not is_causal(model):
            assert not reply.stats.constraint.causal_tokens
            # Each guided step knows one token more; before these there are a canvas's free steps.
            assert max(reply.stats.steps) <= 2 * model.config.canvas_length
    assert by_itself(model, requests[1]).token_ids == replies[1].token_ids


@untrained
def test_fills_are_the_same_alone_and_in_the_engine(model: Model) -> None:
    """A canvas of a fill ends with its block: behind a prompt, one of 4 has room for few tokens."""
    small = model.config.canvas_length == 4
    tried: list[Any] = [Hole(1), Hole(choices=("a", "b"))] if small else [Hole(3), Hole(at_most=4)]
    serving, messages = Engine(model, LAYOUT), [{"role": "user", "content": "Say"}]
    bare = {"ids": model.fills.no_prompt}  # of a vocabulary without a token to begin with, empty
    for hole, given in zip(
        (*tried, tried[0]), ({"messages": messages},) * 2 + (bare,), strict=True
    ):
        parts, how = ["It is ", hole], {"seed": 2, "sampler": FAST}
        handle = serving.submit(Request(**given, parts=parts, **how))  # type: ignore[arg-type]
        run(serving)
        plain = model.fill(parts, messages=given.get("messages"), **how)
        reply = finished(handle).reply
        assert reply.filled is not None
        assert (reply.filled.text, reply.filled.holes) == (plain.text, plain.holes)
        assert plain.text.startswith("It is ") and len(plain.text) > 6
    with pytest.raises(ValueError, match="parts: the holes"):
        model.fill(["It is ", Hole(40)], messages=messages)


def test_decisions_are_the_same_alone_and_beside_others(model: Model) -> None:
    questions = {"good": YesNo("Is it good?"), "color": Choice(["red", "blue", "green"])}
    states = ["It is good.", "x"]
    serving, typed = Engine(model, LAYOUT), schema_of(questions).questions
    handles = [serving.decide(DecisionRequest(state, typed)) for state in states]
    run(serving)
    for state, handle in zip(states, handles, strict=True):
        *_, end = handle.events()
        decided = model.decide(state, questions)
        for name, answer in end.answers.items():
            assert answer.probabilities == tuple(decided[name].probabilities.values())
            assert sum(answer.probabilities) == pytest.approx(1)


@untrained
def test_vectors_do_not_depend_on_company(model: Model) -> None:
    serving = Engine(model, LAYOUT)
    given: dict[str, Any] = {"max_tokens": 0, "pooling": Pooling("mean")}
    handles = [serving.submit(Request(p, **given)) for p in PROMPTS[:2]]
    run(serving)
    again = Engine(model, LAYOUT)
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        single = again.submit(Request(prompt, **given))
        run(again)
        vector = finished(handle).vector  # whose sum rounds by the pieces of the prompt
        assert vector is not None and torch.allclose(vector, finished(single).vector, atol=1e-5)


def is_causal(model: Model) -> bool:
    return TINY[model.family.name].causal


@untrained
def test_the_causal_mode_works_or_is_refused(model: Model) -> None:
    """Replies and scores of prompts."""
    serving, ids = Engine(model, LAYOUT), model.prompt_ids("Hi")
    wanted = [
        Request("Hi", max_tokens=5, seed=1, sampler=SamplerConfig(mode="causal")),
        Request(ids=ids, max_tokens=0, scoring=PromptScoring()),
    ]
    if not is_causal(model):
        for request, field in zip(wanted, ("mode", "scoring"), strict=True):
            with pytest.raises(ValueError, match=f"^{field}: .*causal"):
                serving.submit(request)
        return
    reply, scored = map(serving.submit, wanted)
    run(serving)
    assert finished(reply).reply.token_ids == by_itself(model, wanted[0]).token_ids
    scores = finished(scored).scores
    assert scores is not None and scores.scores is not None
    expected = log_likelihoods(model.network, model.network.new_slot(1), torch.tensor(ids))
    torch.testing.assert_close(scores.scores.log_probs, expected)


@untrained
def test_a_request_ends_anywhere(model: Model) -> None:
    """Cancelled in its first canvas, and later: what has settled stays."""
    request = Request("tell me", max_tokens=40, seed=3, sampler=HOT)
    reply_ids = by_itself(model, request).token_ids
    for steps in (2, 3):
        serving = Engine(model, LAYOUT)
        handle = serving.submit(request)
        for _ in range(steps):
            serving.step()
        handle.cancel()
        run(serving)
        reply = finished(handle).reply
        assert reply.stop_reason == "cancelled" and len(reply.token_ids) < len(reply_ids)
        assert reply.token_ids == reply_ids[: len(reply.token_ids)] and no_slot_is_leaked(serving)


def test_the_server_says_what_the_library_says(model: Model) -> None:
    """As one body and as a stream; its metrics count it, and /memory is the prediction."""
    body = {"messages": CHAT, "max_tokens": 9, "seed": 5, "temperature": 3.0, "max_steps": 2}
    sampler = replace(FAST, temperature=3.0)
    reply = model.generate(messages=CHAT, max_tokens=9, seed=5, sampler=sampler)
    with Engine(model, LAYOUT) as serving, TestClient(
        create_app(Models("sfumato", serving), ServerSettings(page=False))
    ) as client:  # fmt: skip
        chat = "/v1/chat/completions"
        message = client.post(chat, json=body).json()["choices"][0]["message"]
        lines = client.post(chat, json=body | {"stream": True}).text.split("\n\n")
        metrics = client.get("/metrics").text
        memory = client.get("/memory").json()["prediction"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert (message["content"] or "") == "".join(pieces) == reply.text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.labels.get("part", "answer") == "answer"
    }
    assert values["sfumato_output_tokens_total"] == 2 * len(reply.token_ids)
    assert values["sfumato_canvas_tokens_total"] > 0
    prediction = predict(ModelFootprint.of_network(model.network), LAYOUT)
    assert memory["total"] == prediction.total
