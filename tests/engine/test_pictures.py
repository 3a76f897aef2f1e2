"""Pictures in the engine: texts are those of the plain driver, and no other row waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked, outcome
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.scripted_engine import run
from tests.support.seeing_model import seeing_model, shown

from sfumato import Engine, EngineConfig, Hole, Model, Request, SamplerConfig, load
from sfumato.bench.subject import random_checkpoint
from sfumato.diffusion.sampler import Never
from sfumato.engine import Failed, PromptScoring
from sfumato.engine import pictures as phase
from sfumato.media.patches import BUDGETS
from sfumato.model.loading import config_of
from sfumato.model.network import Network
from sfumato.model.vision.tower import Encoding
from sfumato.refused import Refused
from sfumato.tasks.alone import alone as run_alone
from sfumato.tasks.alone import finish
from sfumato.tasks.wants import EmbedTask, PooledState, Pooling, TokenScoring

STEPS = SamplerConfig(max_steps=4, stopping=Never(), ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return seeing_model(tmp_path_factory.mktemp("sees") / "model", is_shallow=True)


def engine(model: Model, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**({"slots": 3, "context": 256} | config)))


def wanted(*content: str | int, **how: Any) -> dict[str, Any]:
    return {"messages": shown(*content), "seed": 5, "max_tokens": 40, "sampler": STEPS} | how


def alone(model: Model, each: dict[str, Any]) -> str:
    return model.generate(**each).text


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order: "slice" of one layer of the tower, "encode" and "denoise"."""
    done: list[str] = []

    def noted(kind: type, name: str, what: str) -> None:
        real = getattr(kind, name)

        def call(*given: Any, **how: Any) -> Any:
            done.append(what)
            return real(*given, **how)

        monkeypatch.setattr(kind, name, call)

    noted(Encoding, "advance", "slice")
    noted(Network, "encode", "encode")
    noted(Network, "denoise_batch", "denoise")
    monkeypatch.setattr(phase, "layers_of_slice", lambda *sizes: 1)
    return done


@pytest.mark.parametrize("chunk", [7, 512])
def test_the_texts_are_those_of_the_plain_driver_in_any_company(model: Model, chunk: int) -> None:
    """One to three pictures, chunks that would end within one, and text beside them."""
    each = [
        wanted(1, "Which digit is this?"),
        wanted("Look:", 2, "and", 3, "What differs?", seed=6),
        wanted(4, 5, 6, seed=7),
        {"prompt": "Who are you?", "seed": 3, "max_tokens": 40},
        wanted("A picture at the end.", 1, seed=9),
    ]
    serving = engine(model, prefill_chunk=chunk)
    handles = []
    for one in each:
        handles.append(serving.submit(Request(**one, retry_empty=False)))
        serving.step()
    run(serving)
    assert [handle.result().text for handle in handles] == [alone(model, one) for one in each]
    assert no_slot_is_leaked(serving)


def test_the_same_one_step_late(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are captured, and the host is a step behind the device."""
    backend = RepeatedCalls()
    monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: backend)
    each = [wanted(n, "What is it?", 3 - n, seed=n) for n in range(3)]
    serving = engine(model, prefill_chunk=16)
    handles = [serving.submit(Request(**one, retry_empty=False)) for one in each]
    run(serving)
    assert [handle.result().text for handle in handles] == [alone(model, one) for one in each]


def test_equal_ids_of_other_pictures_are_not_reused(model: Model) -> None:
    each = [wanted(n, "What is it?") for n in (1, 2)]
    prompts = [model.make_prompt(messages=one["messages"]) for one in each]
    assert prompts[0].ids == prompts[1].ids
    texts = [alone(model, one) for one in each]
    assert texts[0] != texts[1]
    serving = engine(model)
    handles = [serving.submit(Request(**one, retry_empty=False)) for one in (*each, *each)]
    run(serving)
    assert [handle.result().text for handle in handles] == texts * 2
    cached = [handle.terminal.account.cached_tokens for handle in handles]
    assert cached[1] <= prompts[1].pictures[0].start


def test_a_second_turn_costs_its_picture_nothing(model: Model, slices: list[str]) -> None:
    serving = engine(model, slots=1)
    first = serving.generate(Request(**wanted(1, "What is it?", max_tokens=8)))
    done = slices.count("slice")
    assert done == len(model.network.tower.layers)  # type: ignore[union-attr]
    reply = {"role": "assistant", "content": first.text}
    turn = [*shown(1, "What is it?"), reply, {"role": "user", "content": "And then?"}]
    handle = serving.submit(Request(messages=turn, max_tokens=8, seed=1))
    run(serving)
    assert isinstance(handle.result().text, str)
    assert handle.terminal.account.cached_tokens >= 25
    assert slices.count("slice") == done


def test_rows_with_one_picture_share_its_encoding(model: Model, slices: list[str]) -> None:
    """Their prompts begin otherwise, so that no slot has it for both; and later ones find it."""
    layers = len(model.network.tower.layers)  # type: ignore[union-attr]
    serving = engine(model)
    each = [wanted(f"{n}", 1, "What is it?") for n in range(3)]
    handles = [serving.submit(Request(**one, retry_empty=False)) for one in each[:2]]
    run(serving)
    handles.append(serving.submit(Request(**each[2], retry_empty=False)))
    run(serving)
    assert slices.count("slice") == layers
    assert [handle.result().text for handle in handles] == [alone(model, one) for one in each]


def test_a_picture_holds_up_a_step_of_others_by_one_slice(model: Model, slices: list[str]) -> None:
    serving = engine(model)
    long = SamplerConfig(max_steps=60, stopping=Never(), ignore_eos=True)
    beside = serving.submit(Request(prompt="Who are you?", sampler=long, max_tokens=32, seed=1))
    serving.step()
    del slices[:]
    pictured = serving.submit(Request(**wanted(1, 2, "Which?")))
    while pictured.terminal is None and beside.terminal is None:
        serving.step()
    assert slices.count("slice") == 2 * len(model.network.tower.layers)  # type: ignore[union-attr]
    steps = " ".join(slices).split("denoise")
    assert max(step.count("slice") for step in steps) == 1
    assert sum("slice" in step for step in steps) == slices.count("slice")
    run(serving)
    assert pictured.result() and beside.result()


def test_a_slice_is_half_a_step_and_one_layer_at_least(model: Model) -> None:
    tower = model.network.tower
    assert tower is not None
    for patches in (9, 225, 9 * BUDGETS[-1]):
        layers = phase.layers_of_slice(model.config, tower.config, patches)
        assert layers >= 1
        assert phase.layers_of_slice(model.config, tower.config, 4 * patches) <= layers
    text = config_of(random_checkpoint("26b-a4b", "q4_k_m"))
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_layers": 27, "head_dim": 72}
    full = replace(tower.config, **sizes, num_heads=16, kv_heads=16)
    # Of 1024 x 1024 pixels at 280 soft tokens: three slices; at 560 and 1,120 tokens 9 and 27.
    shown = [phase.layers_of_slice(text, full, patches) for patches in (2304, 5040, 10080)]
    assert [-(-27 // layers) for layers in shown] == [3, 9, 27]


def failing(error: Exception, times: int) -> Callable[..., Any]:
    """`Encoding.advance`, which raises so often, in its last layer."""
    real, left = Encoding.advance, [times]

    def advance(encoding: Encoding, layers: int | None = None) -> Any:
        if left[0] and encoding.layer == 1:
            left[0] -= 1
            raise error
        return real(encoding, layers)

    return advance


def test_a_fault_in_the_tower_ends_the_rows_with_that_picture(
    model: Model, slices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoding, "advance", failing(RuntimeError("no"), 1))
    serving = engine(model)
    each = [wanted(1, "a"), wanted(2, "b"), {"prompt": "Who are you?", "max_tokens": 30, "seed": 3}]
    handles = [serving.submit(Request(**one, retry_empty=False)) for one in each]
    run(serving)
    assert isinstance(handles[0].terminal, Failed) and outcome(handles[0]) == "internal"
    assert [h.result().text for h in handles[1:]] == [alone(model, one) for one in each[1:]]
    assert no_slot_is_leaked(serving)
    assert serving.generate(Request(**each[0], retry_empty=False)).text == alone(model, each[0])


def test_out_of_memory_in_the_tower_is_tried_again_and_then_ends_the_row(
    model: Model, slices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shortage = torch.OutOfMemoryError("CUDA out of memory")
    each = wanted(1, "What is it?")
    text, serving = alone(model, each), engine(model)
    monkeypatch.setattr(Encoding, "advance", failing(shortage, 1))
    assert serving.generate(Request(**each, retry_empty=False)).text == text
    serving = engine(model)
    monkeypatch.setattr(Encoding, "advance", failing(shortage, 2))
    handle = serving.submit(Request(**each))
    beside = serving.submit(Request(prompt="Who are you?", max_tokens=30, seed=1))
    run(serving)
    assert (outcome(handle), handle.terminal.kind) == ("memory", "memory")  # type: ignore[union-attr]
    assert beside.result().text and no_slot_is_leaked(serving)
    assert serving.generate(Request(**each, retry_empty=False)).text == text


def test_a_cancelled_picture_is_dropped_on_its_way(model: Model, slices: list[str]) -> None:
    serving = engine(model)
    handle = serving.submit(Request(**wanted(1, "What is it?")))
    serving.step()
    assert slices.count("slice") == 1 and serving._runner._pictures._encoding is not None
    handle.cancel()
    serving.step()
    assert serving._runner._pictures._encoding is None and outcome(handle) == "cancelled"
    assert slices.count("slice") == 1 and not serving.step() and no_slot_is_leaked(serving)


def test_an_encode_that_fails_starts_over_with_its_pictures(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first picture is in the slot already, and what was kept of it is given up."""
    each = [wanted(1, "a", 2, "b"), wanted(3, "c")]
    texts = [alone(model, one) for one in each]
    real, failed = Network.encode, list[int]()

    def encode(network: Any, rows: Any, slots: Any, *more: Any, **how: Any) -> Any:
        if slots[0].length > 30 and not failed:
            failed.append(slots[0].length)
            for slot in slots:
                slot.reset()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(network, rows, slots, *more, **how)

    monkeypatch.setattr(Network, "encode", encode)
    serving = engine(model, prefill_chunk=40)
    handles = [serving.submit(Request(**one, retry_empty=False)) for one in each]
    run(serving)
    assert failed and [handle.result().text for handle in handles] == texts


def test_soft_tokens_are_kept_within_bounds(model: Model, slices: list[str]) -> None:
    layers = len(model.network.tower.layers)  # type: ignore[union-attr]
    serving = engine(model)
    pictures = serving._runner._pictures
    pictures._most = 2 * 25 * model.config.hidden_size * model.network.dtype.itemsize

    def shows(number: int, text: str) -> int:
        before = slices.count("slice")
        serving.generate(Request(**wanted(text, number, max_tokens=4)))
        return slices.count("slice") - before

    assert [shows(number, "a") for number in (1, 2, 3)] == [layers] * 3
    assert len(pictures._kept) == 2
    assert [shows(number, "b") for number in (2, 3, 1)] == [0, 0, layers]


def test_a_fill_sees_pictures(model: Model) -> None:
    serving, parts, texts = engine(model), ["I see ", Hole(6), "."], set()
    for number in (1, 2):
        how: dict[str, Any] = {"parts": parts, "messages": shown(number, "Which?"), "seed": 2}
        filled = serving.generate(Request(**how)).text
        assert filled == model.fill(**how).holes[0].text
        texts.add(filled)
    assert len(texts) == 2


def test_vectors_and_scores_see_pictures(model: Model) -> None:
    """Of all positions, in chunks that a picture would be cut by, and behind a reused prefix."""
    prompt = model.make_prompt(messages=shown(1, "Which?", 2))
    serving = engine(model, prefill_chunk=16)
    for want in (
        lambda: TokenScoring(prompt.ids, PromptScoring()),
        lambda: PooledState(Pooling("last"), len(prompt.ids)),
        lambda: PooledState(Pooling("mean"), len(prompt.ids)),
    ):
        task, own = EmbedTask(prompt, want()), EmbedTask(prompt, want())
        handle = serving.run(task)
        run(serving)
        given, expected = handle.result(), finish(run_alone(model.network, own))
        if not isinstance(given, torch.Tensor):
            given, expected = given.scores.log_probs, expected.scores.log_probs
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_tower_refuses_pictures(model: Model) -> None:
    prompt, serving = (
        model.make_prompt(messages=shown(1)),
        engine(load(device="cpu", mmproj="none")),
    )
    with pytest.raises(Refused, match="only 'text' is supported"):
        serving.submit(Request(**wanted(1, "Which?")))
    with pytest.raises(Refused, match="this model reads no pictures"):
        serving.run(EmbedTask(prompt, PooledState(Pooling("last"), len(prompt.ids))))
