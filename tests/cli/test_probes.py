"""The machine's speed, and whether other work takes it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from sfumato import ops
from sfumato.cli import doctor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(doctor, "ROUNDS", 3)
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def test_only_compiled_operations_are_timed_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ops.backend.startswith("compiled")
    names = set(doctor._works(CPU))
    assert ({"Q4_K_flops", "BF16_flops", "expert_flops"} <= names) == compiled
    monkeypatch.setattr(ops, "backend", "torch")
    assert set(doctor._works(CPU)) == {
        *("float32_flops", "bfloat16_flops", "read_bytes", "dequantized_weights")
    }


def test_waiting_does_not_make_a_machine_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is held up, as by other work, has the speed of its own processor time."""

    def work() -> None:
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        time.sleep(0.02)

    monkeypatch.setattr(doctor, "_works", lambda _: {"read_bytes": (4.0, work)})
    measured = doctor.measure(CPU, cores=1)
    assert measured.busy
    assert measured.share < 0.4
    assert 500 < measured.speed["read_bytes"] <= 1000  # 4 a run of 4 ms, and not of 24
    with monkeypatch.context() as many:
        many.setattr(torch, "get_num_threads", lambda: 8)
        many.setattr(torch, "set_num_threads", lambda _: None)
        several = doctor.measure(CPU, cores=2).speed["read_bytes"]
    assert 900 < several <= 2000


def test_load_alone_makes_a_machine_busy() -> None:
    calm = doctor.Measured("cpu", {}, 3, 1.0, 0.95, 2)
    assert not calm.busy
    assert doctor.Measured("cpu", {}, 3, 6.0, 0.95, 2).busy
    assert doctor.Measured("cpu", {}, 3, None, 0.5, 2).busy


def test_threads_together() -> None:
    speed = {"float32_flops": 100.0, "read_bytes": 10.0}
    assert doctor._of_threads(speed, 1) == speed
    measured = doctor._of_threads(speed, 8)
    assert measured["float32_flops"] == pytest.approx(720)
    assert measured["read_bytes"] == pytest.approx(40)
