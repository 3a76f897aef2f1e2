"""Replies under a grammar in the engine: what the plain loop says, beside any rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.random_model import random_model
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.scripted_engine import run
from torch import Tensor

from sfumato import Engine, EngineConfig, Hole, Model, Request, SamplerConfig
from sfumato.diffusion.constraints.grammar import schema_source
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Draft, Failed, Finished, Settled
from sfumato.model.network import Network
from sfumato.tasks.wants import NextScores

SCHEMAS: tuple[dict[str, Any] | None, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
    None,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 12},
    {"type": "string", "minLength": 20},
    None,
)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(canvas_length=16)


def request_pair(number: int) -> tuple[dict[str, Any], Request]:
    """What the plain loop is asked, and the same of the engine."""
    schema = SCHEMAS[number % len(SCHEMAS)]
    same = {"prompt": f"x{number}", "seed": number, "max_tokens": 40}
    grammar = None if schema is None else schema_source(schema)
    return same | {"schema": schema}, Request(**same, grammar=grammar, drafts=True)  # type: ignore[arg-type]


def as_in_the_loop(model: Model, engine: Engine, count: int = len(SCHEMAS)) -> list[Finished]:
    pairs = [request_pair(number) for number in range(count)]
    handles = [engine.submit(request) for _, request in pairs]
    run(engine)
    ends = []
    for handle, (alone, _) in zip(handles, pairs, strict=True):
        events, expected = list(handle.events()), model.generate(**alone)
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.reply.text, end.reply.stop_reason) == (expected.text, expected.stop_reason)
        assert end.reply.token_ids == expected.token_ids
        assert end.reply.stats.steps == expected.stats.steps
        assert end.reply.stats.constraint == expected.stats.constraint
        settled = [event for event in events if isinstance(event, Settled)]
        assert [i for each in settled for i in each.token_ids] == expected.token_ids
        assert sum(isinstance(event, Draft) for event in events) == sum(expected.stats.steps)
        ends.append(end)
    return ends


def test_rows_of_all_kinds_say_what_the_loop_says(model: Model) -> None:
    engine = Engine(model, EngineConfig(slots=3, context=256))
    ends = as_in_the_loop(model, engine)
    reports = [end.account.constraint for end in ends]
    assert [report is None for report in reports] == [schema is None for schema in SCHEMAS]
    assert sum(report.repairs for report in reports if report) > 0
    assert sum(report.causal_tokens for report in reports if report) > 0
    engine.close()


def test_late_steps_wait_for_the_grammar_and_for_nothing_else(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: RepeatedCalls())
    engine = Engine(model, EngineConfig(slots=3, context=256))
    as_in_the_loop(model, engine, 3)
    engine.close()


def test_a_canvas_whose_rest_is_forced(model: Model) -> None:
    """After two repairs of one step each, two characters are chosen, and the grammar the rest: no
    token waits for scores."""
    schema = {"enum": [first + second + "x" * 20 for first in "ab" for second in "ab"]}
    how: dict[str, Any] = {"prompt": "x", "sampler": SamplerConfig(max_steps=1), "max_tokens": 40}
    alone = model.generate(**how, schema=schema)
    report = alone.stats.constraint
    assert report and report.repairs >= 2 and report.causal_tokens > 0
    engine = Engine(model, EngineConfig(slots=1, context=256))
    handle = engine.submit(Request(**how, seed=0, grammar=schema_source(schema)))
    run(engine)
    assert handle.result().token_ids == alone.token_ids and alone.stop_reason == "eos"
    engine.close()


def test_a_fault_in_writing_starts_over_and_ends_no_other_row(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out once; the text is the same."""
    faults = iter([True, False, True])
    original = Network.encode_hidden

    def failing(network: Any, rows: Any, slots: Any, *given: Any) -> list[Tensor]:
        if next(faults, False):
            for slot in slots:
                slot.reset()
            raise torch.OutOfMemoryError("none left")
        return original(network, rows, slots, *given)

    monkeypatch.setattr(Network, "encode_hidden", failing)
    engine = Engine(model, EngineConfig(slots=3, context=256))
    as_in_the_loop(model, engine, 2)
    engine.close()


@pytest.mark.parametrize("fault", [None, "scores", "forward"])
def test_rows_that_write_together(
    model: Model, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """One forward for both; what fails in one row ends that row, and the other says what it says
    alone."""
    how: dict[str, Any] = {"sampler": SamplerConfig(max_steps=1), "max_tokens": 24, "seed": 0}
    schema = {"type": "string", "minLength": 16, "maxLength": 16}
    texts = [model.generate(prompt, schema=schema, **how).text for prompt in ("x", "yy")]
    original, bad = Network.encode_hidden, list[Any]()
    counts: list[int] = []
    add, added = NextScores.add, list[int]()

    def spied(network: Any, rows: Any, slots: Any, *given: Any) -> list[Tensor]:
        counts.append(len(slots))
        added.clear()
        if fault == "forward" and (len(slots) > 1 or slots[0] in bad or not bad):
            bad[:] = slots if len(slots) == 1 else ()
            for slot in slots:
                slot.reset()
            raise RuntimeError("a fault")
        return original(network, rows, slots, *given)

    def scored(want: NextScores, *given: Any) -> None:
        added.append(1)
        if fault == "scores" and counts[-1] > 1 and len(added) == 1:
            raise FloatingPointError("no numbers")
        add(want, *given)

    monkeypatch.setattr(Network, "encode_hidden", spied)
    monkeypatch.setattr(NextScores, "add", scored)
    engine = Engine(model, EngineConfig(slots=2, context=256))
    grammar = schema_source(schema)
    handles = [engine.submit(Request(prompt, grammar=grammar, **how)) for prompt in ("x", "yy")]
    run(engine)
    assert max(counts) == 2 and len(counts) < 40
    ends = [list(handle.events())[-1] for handle in handles]
    assert sum(isinstance(end, Failed) for end in ends) == (fault is not None)
    for end, text in zip(ends, texts, strict=True):
        assert isinstance(end, Failed) or (isinstance(end, Finished) and end.reply.text == text)
    engine.close()


def test_a_grammar_does_not_go_with_a_continued_reply(model: Model) -> None:
    engine = Engine(model, EngineConfig(slots=1, context=256))
    grammar = schema_source({"type": "object"})
    with pytest.raises(ValueError, match=r"^continued: does not go together"):
        engine.submit(Request("x", continued="{", grammar=grammar))
    with pytest.raises(ValueError, match=r"^stop: does not go together"):
        engine.submit(Request("x", stop="a", grammar=grammar))
    with pytest.raises(ValueError, match=r"^schema: unsatisfiable"):
        engine.submit(Request("x", grammar=schema_source({"enum": []})))
    engine.close()


def test_what_does_not_go_with_a_grammar(model: Model) -> None:
    source = schema_source({"type": "boolean"})
    causal_mode, text = SamplerConfig(mode="causal"), PredictedText("true")
    engine = Engine(model, EngineConfig(slots=1, context=128))
    for fields, named in (
        ({"prompt": "x", "sampler": causal_mode}, "^mode: "),
        ({"prompt": "x", "prediction": text}, "^prediction: "),
        ({"ids": [5], "parts": ("x", Hole(2))}, "^grammar, parts: "),
    ):
        with pytest.raises(ValueError, match=named):
            engine.submit(Request(**fields, grammar=source))  # type: ignore[arg-type]
    for options, named in (({"mode": "causal"}, "^mode: "), ({"prediction": text}, "^prediction")):
        with pytest.raises(ValueError, match=named):
            model.stream("x", schema={"type": "boolean"}, **options)  # type: ignore[arg-type]
