"""Fills in the engine: the texts of the plain path, and one terminal event."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.scripted_engine import run

import sfumato
from sfumato import Draft, Engine, EngineConfig, Failed, Finished, Hole, Model, Request, Settled
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine.audit import entry

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
FAST = sfumato.SamplerConfig(max_steps=4)
PARTS: dict[str, list[Any]] = {
    "exact": ["The capital is ", Hole(5), "."],
    "lengths": ["The ", Hole(at_most=4), " is Paris."],
    "choices": ["It is ", Hole(choices=["Rome", "Paris"]), ", I ", Hole(3), "."],
}


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu", dtype="float32")


def engine(model: Model, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**({"slots": 4, "context": 512} | config)))


def test_texts_are_the_plain_paths_whatever_runs_beside(model: Model) -> None:
    serving = engine(model, prefill_chunk=16)
    chat = serving.submit(Request("Who are you?", max_tokens=16, seed=1, sampler=FAST))
    handles = {
        name: serving.submit(Request(messages=MESSAGES, parts=parts, seed=2, sampler=FAST))
        for name, parts in PARTS.items()
    }
    run(serving)
    for name, parts in PARTS.items():
        plain = model.fill(parts, messages=MESSAGES, seed=2, sampler=FAST)
        reply = handles[name].result()
        assert reply.filled is not None
        assert (reply.filled.text, reply.filled.holes) == (plain.text, plain.holes), name
        assert reply.text == "".join(hole.text for hole in plain.holes)
    assert (
        chat.result().text
        == model.generate("Who are you?", max_tokens=16, seed=1, sampler=FAST).text
    )
    assert not any(slot.busy for slot in serving.state().slots)


def test_events_end_in_one_finished_with_an_account(model: Model) -> None:
    serving, events = engine(model), []  # type: ignore[var-annotated]
    request = Request(ids=[2, 40], parts=PARTS["exact"], seed=2, sampler=FAST, drafts=True)
    serving.submit(request, events.append)
    run(serving)
    *drafts, settled, end = events
    assert drafts and all(isinstance(event, Draft) for event in drafts)
    assert drafts[0].text.startswith("The capital is ")
    assert isinstance(settled, Settled) and settled.top_probs is not None
    assert len(settled.token_ids) == len(settled.top_probs) == 5
    assert isinstance(end, Finished) and end.account.output_tokens == 5
    assert end.account.steps == tuple(end.reply.stats.steps) and end.account.canvas_tokens == 21
    totals = serving.state().totals
    assert (totals.canvases, totals.output_tokens, totals.requests["eos"]) == (1, 5, 1)


def test_the_audit_log_has_parts_and_predictions() -> None:
    parts = ["I am ", Hole(3), Hole(choices=("x", "y"))]
    request = Request(ids=[2], parts=parts, prediction=PredictedText("It is."))
    text = entry(request, Failed("timeout", "late"), {}, text=True)["text"]
    assert text["parts"] == ["I am ", {"tokens": 3}, {"choices": ("x", "y")}]
    assert text["prediction"] == "It is."


def test_a_hole_that_took_all_it_may_says_so(model: Model) -> None:
    serving = engine(model)
    parts = ["x", Hole(at_most=2)]
    reply = serving.generate(Request(ids=[2], parts=parts, seed=1, sampler=FAST))
    assert reply.filled and len(reply.filled.holes[0].alternatives) == 2
    assert (reply.stop_reason == "max_tokens") == (len(reply.token_ids) == 2)
    cut = serving.generate(Request(ids=[2], parts=["x", Hole(9)], stop=list("abcde"), sampler=FAST))
    assert not set(cut.text) & set("abcde")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"opening": "x"}, "opening, parts"),
        ({"thinking": True, "messages": MESSAGES, "ids": None}, "thinking, parts"),
        ({"prediction": PredictedText("x")}, "prediction, parts"),
        ({"parts": ["x"]}, "parts: must have 1"),
        ({"parts": ["x" * 10**6, Hole(1)]}, r"parts\[0\]: 1,000,000 characters"),
        ({"sampler": sfumato.SamplerConfig(max_steps=4096)}, "max_steps: must be at most"),
    ],
)
def test_what_cannot_be_filled_is_refused(model: Model, how: Any, message: str) -> None:
    fields: dict[str, Any] = {"ids": [2], "parts": PARTS["exact"]} | how
    with pytest.raises(ValueError, match=message):
        engine(model, max_steps=100).submit(Request(**fields))


def test_a_cancelled_fill_has_no_text_and_leaves_its_slot(model: Model) -> None:
    serving = engine(model)
    handle = serving.submit(Request(ids=[2], parts=["x", Hole(at_most=20)]))
    serving.step()
    assert serving.state().running[0].phase == "denoise"
    handle.cancel()
    run(serving)
    reply = handle.result()
    assert (reply.stop_reason, reply.text, reply.filled) == ("cancelled", "", None)
    assert not any(slot.busy for slot in serving.state().slots)


def test_memory_that_runs_out_leaves_fewer_canvases_at_a_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model.fill(PARTS["lengths"], messages=MESSAGES, seed=2, sampler=FAST)
    real, failures = model.network.denoise_batch, []  # type: ignore[var-annotated]

    def denoise(tokens: Any, soft: Any, attend: Any) -> Any:
        if len(tokens) > 40:
            failures.append(len(tokens))
            raise MemoryError
        return real(tokens, soft, attend)

    monkeypatch.setattr(model.network, "denoise_batch", denoise)
    serving = engine(model)
    request = Request(messages=MESSAGES, parts=PARTS["lengths"], seed=2, sampler=FAST)
    reply = serving.generate(request)
    assert failures and reply.filled and reply.filled.text == plain.text
    monkeypatch.setattr(model.network, "denoise_batch", lambda *_: 1 / 0)
    handle = serving.submit(request)
    run(serving)
    assert isinstance(handle.terminal, Failed) and handle.terminal.kind == "internal"


def test_a_prediction_is_the_plain_paths_too(model: Model) -> None:
    prediction = PredictedText("The capital is Paris.", 0.3)
    how: Any = {"messages": MESSAGES, "max_tokens": 40, "seed": 4, "prediction": prediction}
    plain = model.generate(**how)
    serving = engine(model)
    handle = serving.submit(Request(**how))
    run(serving)
    assert handle.result().text == plain.text
    assert isinstance(handle.terminal, Finished)
    account = handle.terminal.account
    accepted = plain.stats.accepted_prediction
    assert accepted is not None and account.accepted_prediction == accepted
    assert account.rejected_prediction == 21 - accepted
    with pytest.raises(ValueError, match="prediction: says nothing of a thought"):
        serving.submit(Request(**how, thinking=True))
