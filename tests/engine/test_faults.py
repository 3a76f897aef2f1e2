"""What goes wrong in a row, a batch, memory or the engine itself, and who hears of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.scripted import Script, engine, run

from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.processors import LogitBias
from sfumato.engine import (
    Engine,
    EngineDead,
    Event,
    Failed,
    Finished,
    Handle,
    RequestFailed,
    TooLarge,
)

LONG = "one two three four five six seven.<turn|>"


def outcome(handle: Handle) -> str:
    assert handle.terminal is not None
    if isinstance(handle.terminal, Failed):
        return handle.terminal.kind
    return handle.terminal.reply.stop_reason


def raising(
    error: BaseException, what: str, keys: set[int], times: int = 1000
) -> Callable[[str, list[int]], None]:
    """Raises in forwards of one kind in which one of the keys takes part."""
    left = [times]

    def before(kind: str, asked: list[int]) -> None:
        if kind == what and keys & set(asked) and left[0]:
            left[0] -= 1
            raise error

    return before


class Broken:
    """A sampler that fails."""

    def __init__(self, at: int) -> None:
        self.at = at

    def accept(self, view: Any) -> Any:
        if int(view.step) == self.at:
            raise RuntimeError("a fault in /secret/path")
        return torch.zeros(len(view.tokens), dtype=torch.bool)


def three(**how: Any) -> tuple[Engine, Any, list[Script], list[Handle]]:
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42)]
    serving, network = engine(*scripts)
    handles = [serving.submit(script.request(**how)) for script in scripts]
    return serving, network, scripts, handles


def no_slot_is_leaked(serving: Engine) -> bool:
    return not any(slot.busy for slot in serving.state().slots) and not serving.state().running


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


def test_out_of_memory_once_is_tried_with_the_older_half() -> None:
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42, 43)]
    serving, network = engine(*scripts)
    handles = [serving.submit(script.request()) for script in scripts]
    network.before = raising(torch.OutOfMemoryError("CUDA out of memory"), "denoise", {43}, times=1)
    run(serving)
    assert [h.result().text for h in handles] == [LONG.removesuffix("<turn|>")] * 4
    assert network.denoised()[:3] == [[40, 41, 42, 43], [40, 41], [42, 43]]
    assert network.denoised()[3:5] == [[40, 41], [42, 43]], "the lesson is kept"


def test_out_of_memory_again_ends_the_newest() -> None:
    """Until what is left fits."""
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42, 43)]
    serving, network = engine(*scripts)
    handles = [serving.submit(script.request()) for script in scripts]

    def before(what: str, keys: list[int]) -> None:
        if what == "denoise" and len(keys) > 1:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"
            )

    network.before = before
    run(serving)
    # Four and two do not fit, so 43 ends; of three, one fits and the others follow one by one.
    assert [outcome(h) for h in handles] == ["eos", "eos", "eos", "memory"]
    assert isinstance(handles[3].terminal, Failed)
    assert "memory" in handles[3].terminal.message
    assert no_slot_is_leaked(serving)


@pytest.mark.parametrize("what", ["encode", "denoise"])
def test_out_of_memory_always_ends_everyone_and_not_the_engine(what: str) -> None:
    serving, network, scripts, handles = three()
    network.before = raising(MemoryError(), what, {40, 41, 42})
    run(serving)
    assert [outcome(h) for h in handles] == ["memory"] * 3
    network.before = lambda what, keys: None
    assert serving.generate(scripts[0].request()).text == LONG.removesuffix("<turn|>")
    assert serving.health().ok and no_slot_is_leaked(serving)


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


class Stop(BaseException):
    """What no handler expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_everyone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scripts = [Script(key, 5, LONG, hesitate=[40]) for key in (40, 41, 42)]
    serving, network = engine(*scripts, slots=1)
    handles = [serving.submit(script.request()) for script in scripts]
    network.before = raising(Stop(), "denoise", {40})
    serving.start()
    with caplog.at_level(logging.CRITICAL):
        for handle in handles:
            with pytest.raises(RequestFailed, match=r"internal: the engine has stopped .*\(Stop\)"):
                handle.result()
    health = serving.health()
    assert not health.ok and health.reason and "Stop" in health.reason
    with pytest.raises(EngineDead, match="Stop"):
        serving.submit(scripts[0].request())
    assert "the engine has stopped" in caplog.text
    serving.close()


def test_closing_fails_what_is_left() -> None:
    scripts = [Script(key, 5, LONG, hesitate=[40]) for key in (40, 41)]
    serving, _ = engine(*scripts, slots=1)
    handles = [serving.submit(script.request()) for script in scripts]
    serving.step()
    serving.close()
    assert [outcome(h) for h in handles] == ["shutdown", "shutdown"]
    assert serving.health().reason == "the engine is shutting down"
    with pytest.raises(EngineDead):
        serving.submit(scripts[0].request())
    assert no_slot_is_leaked(serving)
    serving.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_draining_lets_the_accepted_finish(threaded: bool) -> None:
    scripts = [Script(key, 5, LONG, hesitate=[3]) for key in (40, 41)]
    serving, _ = engine(*scripts, slots=1)
    if threaded:
        serving.start()
    handles = [serving.submit(script.request()) for script in scripts]
    serving.close(drain_s=30)
    assert [outcome(h) for h in handles] == ["eos", "eos"]


def test_draining_has_an_end() -> None:
    script = Script(40, 5, LONG, hesitate=[40])
    serving, network = engine(script)
    network.before = lambda what, keys: time.sleep(0.05)
    serving.start()
    handle = serving.submit(script.request())
    began = time.monotonic()
    serving.close(drain_s=0.2)
    assert outcome(handle) == "shutdown" and time.monotonic() - began < 2


def test_a_sink_that_raises_has_its_request_cancelled() -> None:
    scripts = [Script(key, 5, LONG) for key in (40, 41)]
    serving, _ = engine(*scripts)

    def sink(event: Event) -> None:
        raise ConnectionError

    gone, other = serving.submit(scripts[0].request(), sink), serving.submit(scripts[1].request())
    run(serving)
    assert outcome(gone) == "cancelled"
    assert other.result().text == LONG.removesuffix("<turn|>")


def test_an_audit_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def on_finish(request: Any, terminal: Any) -> None:
        told.append((request.id, terminal))
        raise OSError("disk full")

    scripts = [Script(key, 5) for key in (40, 41)]
    serving, _ = engine(*scripts, on_finish=on_finish)
    handles = [serving.submit(script.request()) for script in scripts]
    run(serving)
    assert told == [(h.id, h.terminal) for h in handles]
    assert "disk full" in caplog.text


def test_what_can_never_fit_is_refused_at_once() -> None:
    script = Script(40, 5)
    serving, _ = engine(script, strict=True, context=64)
    with pytest.raises(TooLarge, match=r"needs a context of .* --context"):
        serving.submit(script.request(max_tokens=500))
    assert isinstance(serving.generate(script.request(max_tokens=20)).text, str)


def test_exactly_one_terminal_event_whoever_cancels_when() -> None:
    """Random cancellations, deadlines and faults: each request ends once, and no slot is lost."""
    generator = torch.Generator().manual_seed(3)

    def pick(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    scripts = [Script(key, 3 + key % 20, LONG, hesitate=[key % 5]) for key in range(40, 80)]
    serving, network = engine(*scripts, slots=3, prefill_chunk=8)
    seen: dict[int, list[Event]] = {script.key: [] for script in scripts}
    handles: list[Handle] = []
    waiting = list(scripts)

    def before(what: str, keys: list[int]) -> None:
        if pick(40) == 0:
            raise torch.OutOfMemoryError if pick(2) else RuntimeError

    network.before = before
    while waiting or serving.step():
        if waiting and pick(3) == 0:
            script = waiting.pop()
            drafts = bool(pick(2))
            handles.append(serving.submit(script.request(drafts=drafts), seen[script.key].append))
        if handles and pick(12) == 0:
            handles[pick(len(handles))].cancel()
        serving.step()
    for events in seen.values():
        terminal = [event for event in events if isinstance(event, Finished | Failed)]
        assert len(terminal) == 1 and events[-1] is terminal[0]
    outcomes = serving.state().totals.requests
    assert outcomes.total() == len(scripts) and {"eos", "cancelled"} < set(outcomes)
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
