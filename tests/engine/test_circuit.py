"""The circuit breaker: which failures open it, what it holds up meanwhile, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.faults import LONG, no_slot_is_leaked, outcome, raising
from tests.support.scripted_engine import Script, engine
from tests.support.scripted_model import VOCABULARY

import sfumato
from sfumato.api import Reply
from sfumato.diffusion.limits import Stats
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Engine, EngineDead, Failed, Finished, Handle, NotReady, RequestFailed
from sfumato.engine.circuit import FAILURES, WAITS_S, Circuit, probe
from sfumato.engine.errors import Stops

INTERNAL = Failed("internal", "no")
PROBE = VOCABULARY["<bos>"]


def worked(reason: Any = "eos") -> Finished:
    account: Any = None
    return Finished(Reply("", None, (), [], reason, Stats(1)), account)


class Probe:
    """Works, or does not; counts."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.attempt, self.now = 0, 0.0

    def __call__(self) -> None:
        self.attempt += 1
        if self.error:
            raise self.error

    def clock(self) -> float:
        return self.now


def suspicious(probe: Probe) -> Circuit:
    circuit = Circuit(probe, probe.clock)
    for _ in range(FAILURES):
        circuit.ended(INTERNAL)
    return circuit


def test_failures_of_requests_never_open_it_while_the_probe_works() -> None:
    probe = Probe()
    circuit = Circuit(probe, probe.clock)
    for number in range(20 * FAILURES):
        assert circuit.check() and circuit.reason is None
        circuit.ended(INTERNAL)
        assert probe.attempt == number // FAILURES


@pytest.mark.parametrize("kind", ["invalid", "memory", "timeout", "shutdown", "too_large"])
def test_only_internal_failures_in_a_row_are_suspicious(kind: Any) -> None:
    probe = Probe()
    circuit = Circuit(probe, probe.clock)
    for _ in range(20):
        circuit.ended(Failed(kind, "no"))
        assert circuit.check()
    for _ in range(FAILURES - 1):
        circuit.ended(INTERNAL)
    circuit.ended(worked())
    circuit.ended(INTERNAL)
    assert circuit.check() and probe.attempt == 0
    circuit.ended(worked("cancelled"))  # says nothing of what works
    circuit.ended(INTERNAL)
    circuit.ended(INTERNAL)
    assert circuit.check() and probe.attempt == 1


def test_a_probe_that_works_closes_it() -> None:
    probe = Probe()
    circuit = suspicious(probe)
    probe.error = RuntimeError("/secret/path is gone")
    assert not circuit.check() and circuit.reason is not None
    assert circuit.reason and "RuntimeError" in circuit.reason and "secret" not in circuit.reason
    assert circuit.retry_s() == WAITS_S[0]
    assert not circuit.check() and probe.attempt == 1, "the next probe is not due"
    probe.now += WAITS_S[0]
    probe.error = None
    assert circuit.check() and circuit.reason is None
    assert (circuit.reason, circuit.failures, circuit.probes) == (None, 0, 0)


def test_after_a_bounded_number_of_probes_it_is_over() -> None:
    probe = Probe()
    circuit = suspicious(probe)
    probe.error = RuntimeError("gone")
    for wait in WAITS_S:
        assert not circuit.check()
        assert circuit.retry_s() == wait
        probe.now += wait
    with pytest.raises(Stops, match=r"its own probe 6 of 6 times \(RuntimeError\)"):
        circuit.check()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_a_probe_without_memory_says_nothing(error: Exception) -> None:
    probe = Probe()
    circuit = suspicious(probe)
    probe.error = error
    for attempt in range(1, 3 * len(WAITS_S)):
        assert circuit.check() and circuit.reason is None
        assert circuit.check() and probe.attempt == attempt, "the next probe is not due"
        probe.now += WAITS_S[0]
    probe.error = RuntimeError("gone")
    assert not circuit.check() and circuit.probes == 1
    probe.error = error
    for _ in range(3 * len(WAITS_S)):
        assert circuit.retry_s() == WAITS_S[0]
        probe.now += WAITS_S[0]
        assert not circuit.check() and circuit.probes == 1, "neither counted nor closed"
    probe.error = None
    probe.now += WAITS_S[0]
    assert circuit.check() and circuit.reason is None


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.005)


def broken(
    monkeypatch: pytest.MonkeyPatch, waits: tuple[float, ...], *scripts: Script
) -> tuple[Engine, Any, list[Handle]]:
    """An engine, with a thread, of which everything fails; and its first requests."""
    monkeypatch.setattr("sfumato.engine.circuit.WAITS_S", waits)
    serving, network = engine(*scripts, slots=1)
    network.before = raising(RuntimeError("device lost"), "denoise", {PROBE, 40, 41, 42, 43})
    handles = [serving.submit(script.request()) for script in scripts]
    serving.start()
    return serving, network, handles


SCRIPTS = [Script(key, 5, LONG) for key in (40, 41, 42, 43)]


def test_lasting_failures_make_the_engine_unready_until_it_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving, network, handles = broken(monkeypatch, (0.05,) * 1000, *SCRIPTS)
    until(lambda: not serving.health().ok)
    assert [outcome(h) for h in handles[:3]] == ["internal"] * 3
    assert handles[3].terminal is None, "what waits is held, and not spent on a broken device"
    health = serving.health()
    assert health.reason and "not ready" in health.reason and "RuntimeError" in health.reason
    assert serving.state().circuit_open and serving.death is None
    with pytest.raises(NotReady, match="not ready") as refused:
        serving.submit(SCRIPTS[0].request())
    assert 0 <= refused.value.retry_s <= 0.05
    network.before = lambda what, keys: None
    assert handles[3].result().text == LONG.removesuffix("<turn|>")
    assert serving.health().ok and not serving.state().circuit_open
    assert serving.generate(SCRIPTS[0].request()).text == LONG.removesuffix("<turn|>")
    serving.close()
    assert no_slot_is_leaked(serving)


def test_what_is_held_may_be_cancelled_and_has_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sfumato.engine.circuit.WAITS_S", (5.0,) * 100)
    serving, network = engine(*SCRIPTS, slots=1)
    network.before = raising(RuntimeError("device lost"), "denoise", {PROBE, 40, 41, 42})
    for script in SCRIPTS[:3]:
        serving.submit(script.request())
    late = serving.submit(SCRIPTS[3].request(timeout_s=0.3))
    cancelled = serving.submit(SCRIPTS[3].request())
    serving.start()
    until(lambda: not serving.health().ok)
    cancelled.cancel()
    until(lambda: late.terminal is not None and cancelled.terminal is not None)
    assert (outcome(late), outcome(cancelled)) == ("timeout", "cancelled")
    serving.close()


def test_when_no_probe_works_the_engine_stops_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving, _, handles = broken(monkeypatch, (0.01, 0.02), *SCRIPTS)
    with pytest.raises(RequestFailed, match=r"last 3 requests .* 3 of 3 times \(Runtime"):
        handles[3].result()
    until(lambda: serving.death is not None)
    assert serving.death and "3 of 3 times" in serving.death
    with pytest.raises(EngineDead, match="3 of 3 times"):
        serving.submit(SCRIPTS[0].request())
    serving.close()
    assert serving.death, "closing it afterwards changes nothing"


class Broken:
    """A sampler that fails."""

    def accept(self, view: Any) -> Any:
        raise RuntimeError("a fault of this request alone")


def test_one_clients_failures_are_no_weapon() -> None:
    script = Script(40, 5, LONG)
    serving, network = engine(script, slots=2)
    serving.start()
    for _ in range(4 * FAILURES):
        with pytest.raises(RequestFailed, match="internal"):
            serving.submit(script.request(sampler=SamplerConfig(sampler=Broken()))).result()
        assert serving.health().ok
    assert serving.submit(script.request()).result().text == LONG.removesuffix("<turn|>")
    assert [PROBE] in network.denoised()
    serving.close()
    assert serving.death is None


def test_the_probe_works_on_a_real_model() -> None:
    model = sfumato.load()
    probe(model)
    model.network.denoise_batch = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        probe(model)
