"""Decisions and fills about pictures in the engine: the answers are those of the plain driver."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.faults import no_slot_is_leaked
from tests.support.scripted_engine import run
from tests.support.seeing_model import part, seeing_model, shown

from sfumato import Engine, EngineConfig, Hole, Model, Request
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import ChoiceQuestion, Option, YesNoQuestion
from sfumato.engine import DecisionRequest
from sfumato.refused import Refused

QUESTIONS = {
    "one": YesNoQuestion("Is it a one?"),
    "digit": ChoiceQuestion("", tuple(Option(str(n)) for n in range(10))),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return seeing_model(tmp_path_factory.mktemp("sees") / "model", is_shallow=True)


def state(*content: str | int) -> list[dict[str, Any]]:
    return [part(each) for each in content]


@pytest.mark.parametrize("how", [{}, {"joint": True}, {"samples": 3, "orders": 2}], ids=str)
def test_answers_are_the_plain_paths_whatever_runs_beside(model: Model, how: Any) -> None:
    serving = Engine(model, EngineConfig(slots=3, context=512, prefill_chunk=16))
    states = [state(1, "Look."), state(2, "Look."), state("Two:", 1, 2)]
    settings = DecisionSettings(**how)
    wanted = [model.read_questions(each, QUESTIONS, settings) for each in states]
    assert wanted[0] != wanted[1]
    chat = serving.submit(Request(messages=shown(3, "What is it?"), max_tokens=16))
    handles = [serving.decide(DecisionRequest(each, QUESTIONS, **how)) for each in states]
    run(serving)
    hot = serving.decide(DecisionRequest(states[2], QUESTIONS, **how))
    run(serving)
    assert [handle.result().answers for handle in handles] == wanted
    assert hot.result().answers == wanted[2]
    assert hot.result().usage.cached_tokens >= 50  # the pictures cost nothing again
    assert handles[1].result().usage.cached_tokens < 25  # equal ids are not an equal picture
    assert chat.result() and no_slot_is_leaked(serving)


def test_fills_are_the_plain_paths(model: Model) -> None:
    parts = ["It is ", Hole(choices=["one", "two", "three"]), "."]
    serving = Engine(model, EngineConfig(slots=2, context=512))
    conversations = [shown(n, "Which digit is this?") for n in (1, 2)]
    handles = [
        serving.submit(Request(messages=each, parts=parts, seed=3)) for each in conversations
    ]
    run(serving)
    for handle, messages in zip(handles, conversations, strict=True):
        filled, plain = handle.result().filled, model.fill(parts, messages=messages, seed=3)
        assert filled is not None and filled.text == plain.text
        assert filled.holes[0].probability == pytest.approx(plain.holes[0].probability, abs=1e-4)


def test_what_cannot_be_shown_is_refused_at_once(model: Model) -> None:
    serving = Engine(model, EngineConfig(slots=1, context=48, strict=True))
    for given, message in (
        (state(1, 2, "Look."), r"state: 5 characters and its pictures are 51 tokens or more"),
        ([part(1), "text"], r"state\[1\]: must be "),
        ([{"type": "image", "bytes": b"x"}], r"state\[0\]\.bytes: "),
    ):
        with pytest.raises(Refused, match=message):
            serving.decide(DecisionRequest(given, QUESTIONS))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="order, pictures"):
        serving.decide(DecisionRequest(state(1), QUESTIONS, order="schema"))


def test_the_audit_has_no_pixels(model: Model) -> None:
    patches = model.patches(part(1), "state[0]")
    request = DecisionRequest([{"type": "image", "patches": patches}], QUESTIONS)
    assert json.dumps(request.texts())
    assert request.texts()["state"] == [{"type": "image", "patches": patches.key}]
