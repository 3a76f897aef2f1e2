"""What goes wrong in a row, a batch or a sink, and who hears of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.faults import LONG, no_slot_is_leaked, outcome, raising, three
from tests.support.scripted_engine import Script, engine, run

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import (
    Event,
    Failed,
    Finished,
    Handle,
    RequestFailed,
    TooLarge,
)


class Broken:
    """A sampler that fails."""

    def __init__(self, at: int) -> None:
        self.at = at

    def accept(self, view: Any) -> Any:
        if int(view.step) == self.at:
            raise RuntimeError("a fault in /secret/path")
        return torch.zeros(len(view.tokens), dtype=torch.bool)


def test_a_row_whose_settlement_raises_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    serving, _, scripts, handles = three()
    bad = serving.submit(scripts[0].request(sampler=SamplerConfig(sampler=Broken(at=2))))
    run(serving)
    assert [outcome(h) for h in (*handles, bad)] == ["eos"] * 3 + ["internal"]
    assert isinstance(bad.terminal, Failed) and bad.terminal.account is not None
    assert "RuntimeError" in bad.terminal.message and "secret" not in bad.terminal.message
    assert "secret" in caplog.text  # the log has it
    assert no_slot_is_leaked(serving)


def test_a_row_that_bans_all_its_tokens_is_told_so() -> None:
    serving, network, scripts, handles = three()
    ban = LogitBias(dict.fromkeys(range(network.config.vocab_size), float("-inf")))
    bad = serving.submit(scripts[0].request(sampler=SamplerConfig(processors=(ban,))))
    run(serving)
    assert [outcome(h) for h in (*handles, bad)] == ["eos"] * 3 + ["invalid"]
    with pytest.raises(RequestFailed, match=r"invalid: .*LogitBias.* ban every token"):
        bad.result()


def test_a_batch_that_raises_is_run_row_by_row() -> None:
    serving, network, _, handles = three()
    network.before = raising(RuntimeError("no"), "denoise", {41})
    run(serving)
    assert [outcome(h) for h in handles] == ["eos", "internal", "eos"]
    assert handles[0].result().text == handles[2].result().text == LONG.removesuffix("<turn|>")
    assert network.denoised()[:4] == [[40, 41, 42], [40], [41], [42]]
    assert no_slot_is_leaked(serving)


def test_an_encode_that_raises_in_company_is_done_alone() -> None:
    serving, network, _, handles = three()
    network.before = raising(RuntimeError("no"), "encode", {41})
    run(serving)
    assert [outcome(h) for h in handles] == ["eos", "internal", "eos"]
    assert handles[0].result().text == handles[2].result().text == LONG.removesuffix("<turn|>")
    assert no_slot_is_leaked(serving)


def test_a_commit_that_fails_once_costs_no_text() -> None:
    """The slots of all who took part are empty; prompt and reply are encoded again."""
    serving, network, _, handles = three()
    for _ in range(2):
        serving.step()
    network.before = raising(RuntimeError("once"), "encode", {40, 41, 42}, times=1)
    run(serving)
    assert [h.result().text for h in handles] == [LONG.removesuffix("<turn|>")] * 3


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_slow_step_is_the_last_of_a_request_past_its_deadline() -> None:
    scripts = [Script(key, 5, LONG, hesitate=[20]) for key in (40, 41)]
    clock = Clock()
    serving, network = engine(*scripts, clock=clock)
    late = serving.submit(scripts[0].request(timeout_s=1.5))
    other = serving.submit(scripts[1].request())
    serving.step()
    clock.now = 1.4
    serving.step()
    assert late.terminal is None
    network.before = lambda what, keys: setattr(clock, "now", 10.0)
    serving.step()
    steps = len(network.denoised())
    serving.step()
    assert list(network.denoised()[steps:]) == [[41]]
    assert isinstance(late.terminal, Failed)
    assert (late.terminal.kind, late.terminal.message) == (
        "timeout",
        "the request took longer than its 1.5 s",
    )
    run(serving)
    assert other.result().text == LONG.removesuffix("<turn|>")


def test_a_deadline_holds_in_line_and_the_shorter_one_counts() -> None:
    scripts = [Script(key, 5, LONG, hesitate=[20]) for key in (40, 41, 42)]
    clock = Clock()
    serving, _ = engine(*scripts, clock=clock, slots=1, request_timeout_s=5.0)
    running, short, long = (
        serving.submit(script.request(timeout_s=seconds))
        for script, seconds in zip(scripts, (None, 2.0, 60.0), strict=True)
    )
    serving.step()
    clock.now = 3.0
    serving.step()
    assert (running.terminal, long.terminal) == (None, None)
    assert outcome(short) == "timeout"
    clock.now = 6.0
    serving.step()
    assert outcome(running) == outcome(long) == "timeout"


def test_a_deadline_between_encoding_and_denoising() -> None:
    script = Script(40, 5)
    clock = Clock()
    serving, network = engine(script, clock=clock)
    late = serving.submit(script.request(timeout_s=1.0))
    network.before = lambda what, keys: setattr(clock, "now", 2.0)
    run(serving)
    assert outcome(late) == "timeout"
    assert network.denoised() == []


def test_a_sink_that_raises_has_its_request_cancelled() -> None:
    scripts = [Script(key, 5, LONG) for key in (40, 41)]
    serving, _ = engine(*scripts)

    def sink(event: Event) -> None:
        raise ConnectionError

    broken, other = serving.submit(scripts[0].request(), sink), serving.submit(scripts[1].request())
    run(serving)
    assert outcome(broken) == "cancelled"
    assert other.result().text == LONG.removesuffix("<turn|>")


def test_an_audit_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    finished: list[Any] = []

    def on_finish(request: Any, terminal: Any) -> None:
        finished.append((request.id, terminal))
        raise OSError("disk full")

    scripts = [Script(key, 5) for key in (40, 41)]
    serving, _ = engine(*scripts, on_finish=on_finish)
    handles = [serving.submit(script.request()) for script in scripts]
    run(serving)
    assert finished == [(h.id, h.terminal) for h in handles]
    assert "disk full" in caplog.text


def test_what_can_never_fit_is_refused_at_once() -> None:
    script = Script(40, 5)
    serving, _ = engine(script, strict=True, context=64)
    with pytest.raises(TooLarge, match=r"available context size.* --context"):
        serving.submit(script.request(max_tokens=500))
    assert isinstance(serving.generate(script.request(max_tokens=20)).text, str)


def test_exactly_one_terminal_event_whoever_cancels_when() -> None:
    """Random cancellations, deadlines and faults: each request ends once, and no slot is lost."""
    generator = torch.Generator().manual_seed(3)

    def pick(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    scripts = [Script(key, 3 + key % 20, LONG, hesitate=[key % 5]) for key in range(40, 53)]
    serving, network = engine(*scripts, slots=3, prefill_chunk=8)
    seen: list[list[Event]] = []
    handles: list[Handle] = []
    waiting = [script for script in scripts for _ in range(2)]  # the second finds the first's

    def before(what: str, keys: list[int]) -> None:
        if pick(40) == 0:
            raise torch.OutOfMemoryError if pick(2) else RuntimeError

    network.before = before
    while waiting or serving.step():
        if waiting and pick(3) == 0:
            script = waiting.pop()
            drafts = bool(pick(2))
            seen.append([])
            handles.append(serving.submit(script.request(drafts=drafts), seen[-1].append))
        if handles and pick(12) == 0:
            handles[pick(len(handles))].cancel()
        serving.step()
    for events in seen:
        terminal = [event for event in events if isinstance(event, Finished | Failed)]
        assert len(terminal) == 1 and events[-1] is terminal[0]
        if isinstance(terminal[0], Finished) and terminal[0].reply.stop_reason == "eos":
            assert terminal[0].reply.text == LONG.removesuffix("<turn|>")
    totals, outcomes = serving.state().totals, serving.state().totals.requests
    assert totals.cached_tokens > 0
    assert outcomes.total() == 2 * len(scripts) and {"eos", "cancelled"} < set(outcomes)
    assert no_slot_is_leaked(serving)


def test_a_cancelled_request_keeps_what_had_settled() -> None:
    script = Script(40, 5, LONG)
    serving, network = engine(script)
    handle = serving.submit(script.request())
    for _ in range(3):
        serving.step()
    handle.cancel()
    serving.step()
    reply = handle.result()
    assert (reply.text, reply.stop_reason) == ("one two ", "cancelled")
    assert not serving.step() and len(network.denoised()) == 3
    handle.cancel()  # and a second time does nothing
    assert not serving.step()


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("no"), "internal"), (MemoryError(), "memory")]
)
def test_what_fails_in_a_rows_preparation_ends_that_row_alone(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others lose neither their step nor a run in one batch."""
    serving, network, scripts, handles = three()
    bad = serving.submit(replace(scripts[0].request(), seed=99))
    prepares = Canvas.prepare

    def fails(self: Canvas) -> Any:
        if self.noise.seed == 99:
            raise error
        return prepares(self)

    monkeypatch.setattr(Canvas, "prepare", fails)
    run(serving)
    assert [outcome(h) for h in (*handles, bad)] == ["eos"] * 3 + [kind]
    assert network.denoised()[0] == [40, 41, 42]
    assert no_slot_is_leaked(serving)


def test_a_schedule_that_changes_its_mind_ends_its_row_alone() -> None:
    class Moody:
        calls = 0

        def temperature(self, step: int, max_steps: int) -> float:
            self.calls += 1
            return 0.5 if self.calls <= max_steps + 1 else 1e300

    serving, network, scripts, handles = three()
    bad = serving.submit(scripts[0].request(sampler=SamplerConfig(schedule=Moody())))
    run(serving)
    assert [outcome(h) for h in (*handles, bad)] == ["eos"] * 3 + ["invalid"]
    assert all(len(keys) >= 3 for keys in network.denoised()), "no step was run row by row"


def test_a_schedule_is_checked_for_every_step_beforehand() -> None:
    class Late:
        def temperature(self, step: int, max_steps: int) -> float:
            return 0.5 if step < max_steps else 0.0

    class CountsDown:
        def k(self, step: int, max_steps: int) -> int:
            return 3 - step

    script = Script(40, 5)
    serving, network = engine(script)
    with pytest.raises(ValueError, match=r"^schedule Late: .* got 0.0 at step 9$"):
        serving.submit(script.request(sampler=SamplerConfig(schedule=Late(), max_steps=9)))
    with pytest.raises(ValueError, match=r"^soft_top_k CountsDown: .* got 0 at step 3$"):
        serving.submit(script.request(sampler=SamplerConfig(soft_top_k=CountsDown())))
    assert network.log == []
