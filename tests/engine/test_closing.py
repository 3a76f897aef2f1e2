"""How an engine ends, in good order or not, beside threads that look on."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from tests.engine.faults import LONG, no_slot_is_leaked, outcome, raising
from tests.support.scripted_engine import Script, engine, run

from sfumato.engine import (
    EngineDead,
    Event,
    Failed,
    Finished,
    Handle,
    RequestFailed,
)
from sfumato.engine.row import Row


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
    assert outcome(handle) == "shutdown" and time.monotonic() - began < 8


def test_a_step_that_does_not_end_holds_nobody_up() -> None:
    """Everybody is told; the slot is left alone while the step may be using it, and what comes of
    the step goes nowhere."""
    script = Script(40, 5, LONG)
    serving, network = engine(script)
    inside, go = threading.Event(), threading.Event()

    def before(what: str, keys: list[int]) -> None:
        if what == "denoise":
            inside.set()
            assert go.wait(10)

    network.before = before
    events: list[Event] = []
    serving.start()
    handle = serving.submit(script.request(drafts=True), events.append)
    assert inside.wait(10)
    began = time.monotonic()
    serving.close(join_s=0.05)
    assert time.monotonic() - began < 8 and outcome(handle) == "shutdown"
    (place,) = [place for place in serving._pool._places if place.busy]
    assert place.slot.length == 5
    go.set()
    thread = serving._lifecycle.thread
    assert thread
    thread.join(10)
    assert events == [handle.terminal]
    serving.close()
    assert not any(place.busy for place in serving._pool._places) or thread.is_alive()


def test_a_client_that_has_its_reply_finds_it_in_the_totals() -> None:
    script = Script(40, 5)
    serving, _ = engine(script)
    counted: list[int] = []

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            counted.append(serving.state().totals.output_tokens - event.account.output_tokens)

    serving.submit(script.request(), sink)
    run(serving)
    assert counted == [0]


def test_no_event_comes_after_the_terminal_one() -> None:
    """Though it was on its way in another thread."""
    seen: list[Any] = []
    inside, go = threading.Event(), threading.Event()

    def sink(event: Event) -> None:
        if not isinstance(event, Failed):
            inside.set()
            go.wait(10)
        seen.append(event)

    handle = Handle("req-1", sink, lambda: None)
    draft: Any = object()
    slow = threading.Thread(target=handle.deliver, args=(draft,))
    slow.start()
    assert inside.wait(10)
    end = threading.Thread(target=handle.deliver, args=(Failed("shutdown", "over"),))
    end.start()
    end.join(0.1)
    go.set()
    slow.join(10)
    end.join(10)
    assert seen == [draft, handle.terminal]


def test_a_row_is_told_of_while_it_loses_its_slot() -> None:
    """By another thread than the one that clears it."""
    script = Script(40, 5, LONG)
    serving, _ = engine(script)
    serving.submit(script.request())
    serving.step()
    (row,) = serving._scheduler.running

    class Losing(Row):
        looks = 0

        @property  # type: ignore[override]
        def lease(self) -> Any:
            self.looks += 1
            return self.__dict__["lease"] if self.looks % 2 else None

    losing = object.__new__(Losing)
    losing.__dict__.update(row.__dict__)
    serving._scheduler.running[:] = [losing]
    serving.state()
    losing.looks = 1
    serving.state()
    losing.looks = 0
    serving._publish()
