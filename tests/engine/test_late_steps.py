"""An engine whose device works by itself: it says the same, one step late, and faults end as ever.

On a CPU, with stand-ins for graphs; `RepeatedCalls` gives the bits of the CPU's own step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked, outcome
from tests.support.recorded_graphs import RecordedGraphs, RepeatedCalls
from tests.support.scripted_engine import run
from tests.support.shallow_model import shallow_checkpoint

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.diffusion.constraints.questions import ChoiceQuestion, Option, YesNoQuestion
from sfumato.diffusion.sampler import FixedCount, Never
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.captured import DeviceStep, ReadForward
from sfumato.diffusion.step.denoiser import Pending
from sfumato.engine import (
    DecisionRequest,
    EngineDead,
    Finished,
    Handle,
    PromptScoring,
    RequestFailed,
)
from sfumato.model.cache import KVPool, Slot
from sfumato.model.network import Network
from sfumato.ops import registry

SAMPLERS = (
    SamplerConfig(max_steps=3),
    SamplerConfig(temperature=0, max_steps=4),
    SamplerConfig(sampler=FixedCount(4), max_steps=5),
    SamplerConfig(canvas_length=16, max_steps=3),
    SamplerConfig(ignore_eos=True, max_steps=2),
    SamplerConfig(top_k=3, max_steps=3),
)
FIXED = SamplerConfig(max_steps=3, stopping=Never(), ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(shallow_checkpoint(), device="cpu", dtype="float32")


@pytest.fixture
def late(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Any]]:
    """Makes an engine on a stand-in."""

    def make(
        kind: Callable[[], Any] = RepeatedCalls, on_finish: Any = None, **config: Any
    ) -> tuple[Engine, Any]:
        backend = kind()
        monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: backend)
        layout = EngineConfig(**({"slots": 3, "context": 256} | config))
        return Engine(model, layout, on_finish), backend

    return make


def wanted(seed: int, **choices: Any) -> dict[str, Any]:
    prompt = ("Who are you?", "name a color", "the sea and its ships")[seed % 3]
    return {"prompt": prompt, "seed": seed, "max_tokens": 70} | choices


@cache
def _reply(model: Model, items: tuple[tuple[str, Any], ...]) -> Any:
    return model.generate(**dict(items))


def alone(model: Model, each: dict[str, Any]) -> Any:
    """The plain loop's reply."""
    return _reply(model, tuple(each.items()))


def same(one: Any, other: Any) -> bool:
    return (one.token_ids, one.stop_reason, one.stats.steps, one.stats.convergence) == (
        *(other.token_ids, other.stop_reason, other.stats.steps, other.stats.convergence),
    )


def test_it_says_the_same(
    model: Model, late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever joins and leaves, with canvases committed in the steps of other rows."""
    committed: list[int] = []
    serve = DeviceStep.run
    monkeypatch.setattr(
        DeviceStep, "run", lambda step: (committed.append(step.kind.commits), serve(step))[1]
    )
    serving, backend = late()
    chosen, handles, asked_for = random.Random(3), [], []
    for seed, sampler in enumerate(SAMPLERS):
        asked_for.append(wanted(seed, sampler=sampler))
        handles.append(serving.submit(Request(**asked_for[-1], retry_empty=False, drafts=True)))
        for _ in range(chosen.randrange(4)):
            serving.step()
    run(serving)
    for each, handle in zip(asked_for, handles, strict=True):
        assert same(handle.result(), alone(model, each)), each
    assert backend.captures and backend.replays and sum(committed) and no_slot_is_leaked(serving)


@pytest.mark.parametrize(("slots", "context"), [(1, 32), (3, 256)])
def test_a_warm_up_runs_each_kind_of_step_and_leaves_no_trace(
    model: Model,
    late: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    context: int,
) -> None:
    ran: list[tuple[int, bool]] = []
    reads: list[int] = []
    step, read = DeviceStep.run, ReadForward.run
    monkeypatch.setattr(
        DeviceStep, "run", lambda one: (ran.append((one.rows, one.kind.commits)), step(one))[1]
    )
    monkeypatch.setattr(ReadForward, "run", lambda one: (reads.append(one.rows), read(one))[1])
    serving, backend = late(slots=slots, context=context)
    serving.warm_up()
    # The steps of one row and of all, by the denoiser that serves.
    assert backend.captures == backend.replays == len({1, slots})
    assert serving._runner._denoiser.graphs.captured == len({1, slots})
    assert sorted(set(ran)) == [(rows, way) for rows in sorted({1, slots}) for way in (False, True)]
    assert reads and not any(slot.length for slot in serving._pool.empty_slots)
    assert serving.state().totals == late()[0].state().totals
    each = wanted(1, max_tokens=16)
    if context == 256:
        assert same(serving.generate(Request(**each, retry_empty=False)), alone(model, each))


def test_a_warm_up_that_fails_is_logged(
    late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(step: DeviceStep) -> None:
        raise RuntimeError("no kernel image")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStep, "run", fails)
        serving, _ = late(slots=2)
        serving.warm_up()
    assert "the steps before the first request failed" in caplog.text
    assert not any(slot.length for slot in serving._pool.empty_slots)
    assert serving.generate(Request(**wanted(1, max_tokens=16))).token_ids


def test_recorded_operations_say_the_same(late: Callable[..., Any]) -> None:
    """Replayed without Python: what the host decides reaches the step through tensors alone."""
    with registry.reference_only():
        texts = []
        for backends in (lambda: None, RecordedGraphs):
            serving, backend = late(backends, slots=2)
            asked_for = [wanted(seed, sampler=FIXED, max_tokens=40) for seed in range(3)]
            handles = [serving.submit(Request(**each, retry_empty=False)) for each in asked_for]
            run(serving)
            texts.append([handle.result().token_ids for handle in handles])
    assert texts[0] == texts[1] and backend.replays > backend.captures > 1


def test_a_step_is_launched_before_the_last_one_is_read(
    late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none beyond a canvas's last step, of which the host knows."""
    order: list[str] = []
    launch, read = Denoiser.launch, Pending._read

    def noted(what: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: (order.append(what), serve(*inputs))[1]

    monkeypatch.setattr(Denoiser, "launch", noted("launch", launch))
    monkeypatch.setattr(Pending, "_read", noted("read", read))
    serving, _ = late(slots=1)
    reply = serving.generate(Request(**wanted(1, sampler=FIXED, max_tokens=32)))
    assert reply.stats.steps == [3] and reply.stats.canvases == 1
    assert 0 < reply.stats.prefill_s == serving.state().totals.encode_s
    assert order == ["launch", "launch", "read", "launch", "read", "read"]


def test_rows_that_end_meanwhile_are_left_alone(model: Model, late: Callable[..., Any]) -> None:
    """A row is cancelled while its step is under way; another one takes its slot."""
    serving, _ = late(slots=1)
    first = serving.submit(Request(**wanted(1, sampler=FIXED)))
    serving.step(), serving.step()
    first.cancel()
    each = wanted(2, sampler=FIXED)
    second = serving.submit(Request(**each, retry_empty=False))
    run(serving)
    assert outcome(first) == "cancelled" and same(second.result(), alone(model, each))


def submitted(serving: Engine, count: int) -> tuple[list[dict[str, Any]], list[Handle]]:
    each = [wanted(seed, sampler=FIXED) for seed in range(count)]
    return each, [serving.submit(Request(**one, retry_empty=False)) for one in each]


def steps_until(serving: Engine, holds: Callable[[], Any]) -> None:
    while not holds():
        assert serving.step(), "it never came to hold"


@pytest.mark.parametrize("after", [1, 3])
def test_a_replay_that_fails_costs_no_text(
    model: Model, late: Callable[..., Any], after: int
) -> None:
    """In a step of denoising rows, or with a commit among them."""
    serving, backend = late()
    each, handles = submitted(serving, 3)
    steps_until(serving, lambda: backend.replays >= after)
    backend.replay_error = RuntimeError("a fault")
    steps_until(serving, lambda: backend.replay_error is None)
    run(serving)
    for one, handle in zip(each, handles, strict=True):
        assert same(handle.result(), alone(model, one))
    assert no_slot_is_leaked(serving)


def test_memory_that_ends_in_a_step_costs_no_text(model: Model, late: Callable[..., Any]) -> None:
    """The graphs are dropped, and half of the rows are tried."""
    serving, backend = late()
    each, handles = submitted(serving, 3)
    graphs = serving._runner._denoiser.graphs
    steps_until(serving, lambda: backend.replays)
    assert graphs.captured
    backend.replay_error = torch.OutOfMemoryError("once")
    steps_until(serving, lambda: backend.replay_error is None)
    assert not graphs.captured
    run(serving)
    for one, handle in zip(each, handles, strict=True):
        assert same(handle.result(), alone(model, one))


def test_results_that_never_arrive_end_their_rows_alone(
    model: Model, late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, _ = late()
    _, handles = submitted(serving, 3)
    for _ in range(2):
        serving.step()
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "_read", failing)
        serving.step()
    assert [outcome(handle) for handle in handles] == ["internal"] * 3
    each, (handle,) = submitted(serving, 1)
    run(serving)
    assert same(handle.result(), alone(model, each[0])) and no_slot_is_leaked(serving)


def failing(*inputs: Any) -> Any:
    raise RuntimeError("CUDA error: device lost")


def lose_device(monkeypatch: pytest.MonkeyPatch, serving: Engine, backend: Any) -> None:
    """Every call to the device raises: forwards, replays, copies both ways, the cache."""
    device_calls = (
        *((Network, name) for name in ("denoise_batch", "encode")),
        *((Network, name) for name in ("encode_beside", "denoise_beside")),
        *((Slot, name) for name in ("snapshot", "restore")),
        (Pending, "_read"),
    )
    for owner, name in device_calls:
        monkeypatch.setattr(owner, name, failing)
    set_length = KVPool.set_length

    def lost(pool: KVPool, index: int, length: int) -> None:
        set_length(pool, index, length)  # the host's side, which comes first
        failing()

    monkeypatch.setattr(KVPool, "set_length", lost)
    for module in ("diffusion.step.batch", "diffusion.step.rules", "diffusion.canvas"):
        monkeypatch.setattr(f"sfumato.{module}.to_device", failing)
    backend.replay_error = RuntimeError("CUDA error: device lost")


@pytest.mark.parametrize("decides", [False, True], ids=["replies", "and a decision"])
def test_a_lost_device_ends_the_engine(
    late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, decides: bool
) -> None:
    """Each request ends once, as an internal failure, and the engine, whose probes fail too, stops:
    `sfumato serve` then exits with a code of its own."""
    monkeypatch.setattr("sfumato.engine.circuit.WAITS_S", (0.01, 0.02))
    ends: list[str] = []
    serving, backend = late(slots=4, on_finish=lambda request, _: ends.append(request.id))
    _, handles = submitted(serving, 3)
    if decides:
        questions = {"q": YesNoQuestion("Is it?")}
        handles.append(serving.decide(DecisionRequest("Hm.", questions)))  # type: ignore[arg-type]
        serving.step()
    for _ in range(3):
        serving.step()
    ends.clear()
    going = [handle for handle in handles if handle.terminal is None]
    lose_device(monkeypatch, serving, backend)
    serving.start()
    for handle in going:
        with pytest.raises(RequestFailed):
            handle.result()
    assert [outcome(handle) for handle in going] == ["internal"] * len(going)
    assert sorted(ends) == sorted(handle.id for handle in going) and len(going) >= 3
    assert serving._lifecycle.thread
    serving._lifecycle.thread.join(20)
    assert serving.death and "the engine has stopped" in serving.death
    with pytest.raises(EngineDead):
        submitted(serving, 1)
    serving.close()


@pytest.mark.parametrize("how", [{}, {"steps": 2, "samples": 2, "label_mass": False}], ids=str)
def test_decisions_are_read_in_graphs(
    model: Model, late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Beside a chat and each other; and without a graph where questions find no places."""
    ran: list[int] = []
    read = ReadForward.run
    monkeypatch.setattr(ReadForward, "run", lambda one: (ran.append(one.rows), read(one))[1])
    options = Option("billing", "pay"), Option("tech"), Option("?")
    questions = {"team": ChoiceQuestion("Which?", options), "urgent": YesNoQuestion("Urgent?")}
    plain = Engine(model, EngineConfig(slots=3, context=256))
    wanted_answers = plain.decide(DecisionRequest("Hm.", questions, **how))
    run(plain)
    serving, backend = late()
    handles = [serving.submit(Request(**wanted(1), retry_empty=False))]
    for _ in range(3):
        handles.append(serving.decide(DecisionRequest("Hm.", questions, **how)))
        run(serving)
    assert set(ran) <= {1, 2, 3} and backend.replays and no_slot_is_leaked(serving)
    pool = serving._runner._forwards._questions
    leases = [pool.lease(16) for _ in range(pool.places // 16)]
    assert all(leases), "all places are free again"
    ran.clear()
    replays = backend.replays
    handles.append(serving.decide(DecisionRequest("Hm.", questions, **how)))
    run(serving)
    assert ran and backend.replays == replays, "the same operations, without a graph"
    for handle in handles[1:]:
        for name, answer in wanted_answers.result().answers.items():
            other = handle.result().answers[name]
            assert other.probabilities == pytest.approx(answer.probabilities, abs=1e-4)


def test_causal_rows_are_drawn_in_their_step(model: Model, late: Callable[..., Any]) -> None:
    """Beside canvases, whose steps are late; none of their tokens is a commit of a step."""
    serving, backend = late()
    choices = (
        {"sampler": SamplerConfig(mode="causal"), "max_tokens": 8},
        {"sampler": SamplerConfig(max_steps=3), "max_tokens": 40},
    )
    asked_for = [wanted(seed, **each) for seed, each in enumerate(choices)]
    handles = [serving.submit(Request(**each, retry_empty=False)) for each in asked_for]
    scored = serving.submit(Request(ids=[2, 40, 41], scoring=PromptScoring(), max_tokens=0))
    run(serving)
    for each, handle in zip(asked_for, handles, strict=True):
        assert same(handle.result(), alone(model, each)), each
    end = scored.terminal
    assert isinstance(end, Finished) and end.scores is not None
    assert backend.replays and no_slot_is_leaked(serving)


def test_memory_that_is_never_enough_ends_the_requests_and_not_the_engine(
    model: Model, late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, _ = late()
    _, handles = submitted(serving, 3)

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStep, "run", short)
        run(serving)
    assert [outcome(handle) for handle in handles] == ["memory"] * 3
    each, (handle,) = submitted(serving, 1)
    run(serving)
    assert same(handle.result(), alone(model, each[0])) and no_slot_is_leaked(serving)


def test_a_snapshot_without_memory_costs_no_text(
    model: Model, late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(slot: Slot) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Slot, "snapshot", short)
    serving, _ = late()
    each, handles = submitted(serving, 2)
    run(serving)
    for one, handle in zip(each, handles, strict=True):
        assert same(handle.result(), alone(model, one))
    assert serving.state().snapshot_bytes == 0 and no_slot_is_leaked(serving)
