"""Requests that name adapters: in any company they get what they get alone, no prefix is shared
between adapters, and an adapter stays until the last request that named it has ended."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.random_adapter import random_changes
from tests.support.random_model import random_model
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.scripted_engine import run

from sfumato import Engine, EngineConfig, Hole, Model, Request, SamplerConfig, YesNo
from sfumato.diffusion.constraints.questions import YesNoQuestion
from sfumato.diffusion.sampler import Never
from sfumato.engine import DecisionRequest, Failed
from sfumato.model.adapters import LowRank
from sfumato.model.transformer import Linear
from sfumato.ops import registry
from sfumato.refused import Refused

NAMES = (None, "a", "b")
SAMPLER = SamplerConfig(max_steps=3, canvas_length=16)
PROMPT = "Name a color of the sea, and then the town at which its ships are."


@pytest.fixture
def model() -> Model:
    model = random_model()
    for seed, name in enumerate(("a", "b")):
        model.adapters.attach(name, random_changes(model.network, seed))
    return model


def wanted(seed: int, **more: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "seed": seed, "max_tokens": 20, "sampler": SAMPLER}
    return fields | {"adapter": NAMES[seed % 3]} | more


def serving(model: Model, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**({"slots": 4, "context": 256} | config)))


def result(engine: Engine, *handles: Any) -> list[Any]:
    run(engine)
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("backend", [None, RecordedGraphs])
def test_rows_of_several_adapters_get_what_they_get_alone(
    model: Model, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies, fills and decisions that join and leave; with and without graphs, of which one of
    other adapters is never taken."""
    graphs = backend and backend()
    with registry.reference_only() if graphs else nullcontext():
        _mixed(model, graphs, monkeypatch)


def _mixed(model: Model, graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: graphs)
    engine, chosen = serving(model, prefill_chunk=24), random.Random(1)
    each = [wanted(seed) for seed in range(6)]
    if graphs is not None:  # steps that are alike, until they are captured
        long = SamplerConfig(max_steps=8, canvas_length=16, stopping=Never())
        each = [wanted(seed, sampler=long, max_tokens=16) for seed in range(3)] + each[:4]
    parts, questions = ["I am ", Hole(6), "."], {"q": YesNoQuestion("Is it a color?")}
    state, replies, others = "Blue is a color of the sea.", [], []
    for number, fields in enumerate(each):
        replies.append(engine.submit(Request(**fields, retry_empty=False)))
        if number < len(NAMES):
            name = NAMES[number]
            decided = engine.decide(DecisionRequest(state, questions, adapter=name))
            fill = Request("x", parts=parts, seed=1, adapter=name, sampler=SAMPLER)
            others.append((name, decided, engine.submit(fill)))
        for _ in range(chosen.randrange(3)):
            engine.step()
    run(engine)
    assert graphs is None or (graphs.captures and graphs.replays)
    texts: dict[str | None, set[str]] = {name: set() for name in NAMES}
    for fields, handle in zip(each, replies, strict=True):
        assert handle.result().text == model.generate(**fields).text
        texts[fields["adapter"]].add(handle.result().text)
    assert len(set[str]().union(*texts.values())) == sum(map(len, texts.values()))
    answers = set()
    for name, decided, filled in others:
        own = model.decide(state, {"q": YesNo("Is it a color?")}, adapter=name)
        probability = decided.result().answers["q"].probability
        assert probability == pytest.approx(own["q"].probabilities[True], abs=1e-6)
        answers.add(round(probability, 5))
        messages = [{"role": "user", "content": "x"}]
        alone = model.fill(parts, messages=messages, seed=1, sampler=SAMPLER, adapter=name)
        assert filled.result().filled.text == alone.text
    assert len(answers) == 3


def test_a_prefix_serves_its_own_adapter_alone(model: Model) -> None:
    """Whether its slot is free or busy; and a name that another adapter gets begins anew."""
    engine, cached = serving(model), {}
    for name in (*NAMES, *NAMES):
        handle = engine.submit(Request(PROMPT, seed=1, max_tokens=9, adapter=name))
        run(engine)
        cached.setdefault(name, []).append(handle.terminal.account.cached_tokens)
    assert all(first == 0 and second > 20 for first, second in cached.values())
    both = [Request(PROMPT, seed=1, max_tokens=9, adapter=name) for name in ("a", "b")]
    before = [each.text for each in result(engine, *map(engine.submit, both))]
    engine.unload_adapter("a")
    engine.load_adapter("a", random_changes(model.network, 9))
    run(engine)
    handles = [engine.submit(each) for each in both]
    after = [each.text for each in result(engine, *handles)]
    assert before[0] != after[0] and before[1] == after[1]
    assert handles[0].terminal.account.cached_tokens == 0
    assert after[0] == model.generate(PROMPT, seed=1, max_tokens=9, adapter="a").text


def test_who_named_an_adapter_keeps_it_to_the_end(model: Model) -> None:
    engine = serving(model, slots=2)
    fields = [wanted(1), wanted(4), wanted(7)]  # the last waits for a slot
    alone = [model.generate(**each).text for each in fields]
    handles = [engine.submit(Request(**each, retry_empty=False)) for each in fields]
    engine.step()
    late = Request(**wanted(1), retry_empty=False)
    unloaded = engine.unload_adapter("a")
    between = engine.submit(late)  # who looked the name up before the engine has taken it off
    engine.step()
    assert unloaded.result(0).name == "a" and len(model.adapters.leaving) == 1
    with pytest.raises(Refused, match="adapter: there is no adapter 'a'; there are b"):
        engine.submit(late)
    handles.append(between)
    assert [each.text for each in result(engine, *handles)] == [*alone, alone[0]]
    engine.step()
    assert not model.adapters.leaving
    modules = model.network.transformer.modules()
    changes = [module.changes for module in modules if isinstance(module, Linear)]
    assert {number for each in changes for number in each} == {2}


def test_a_name_that_went_between_look_up_and_queue_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving(model)
    engine.unload_adapter("a")
    run(engine)
    monkeypatch.setattr(model.adapters, "number", lambda name: 1)
    handle = engine.submit(Request(**wanted(1)))
    run(engine)
    assert isinstance(handle.terminal, Failed) and "unloaded" in handle.terminal.message


def test_what_cannot_be_loaded_is_refused_and_counted_as_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving(model)
    engine._guard.view = replace(engine._guard.view, spare=100_000)
    wrong = {"layers.0.self_attn.q_proj": LowRank(torch.zeros(2, 3), torch.zeros(4, 2), 1.0)}
    large = LowRank(torch.zeros(200, 128), torch.zeros(128, 200), 1.0)
    for name, adapter, error in (
        ("a", {}, "name: the adapter 'a' is loaded already"),
        ("c", wrong, r"layers\.0\.self_attn\.q_proj: "),
        ("c", {"layers.0.self_attn.q_proj": large}, "adapter 'c' takes 0.2 MB"),
    ):
        future = engine.load_adapter(name, adapter)
        run(engine)
        with pytest.raises(Refused, match=error):
            future.result(0)
        assert engine._guard.view.spare == 100_000
    with pytest.raises(Refused, match="name: '' is no name of a model: use printable"):
        engine.load_adapter("", {})
    small = random_changes(model.network, 3, ("v_proj",))
    loaded = engine.load_adapter("c", small)
    run(engine)
    assert engine._guard.view.spare == 100_000 - loaded.result(0).nbytes < 100_000
    engine.unload_adapter("c")
    run(engine)
    engine.step()
    assert engine._guard.view.spare == 100_000
    monkeypatch.setattr("sfumato.model.named_adapters.MOST", 2)
    future = engine.load_adapter("c", small)
    run(engine)
    with pytest.raises(Refused, match="2 adapters are loaded, which is the limit"):
        future.result(0)
