"""Kernels that Triton's cache lacks are compiled before a start, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sfumato.ops.triton.kernel import installed

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
if installed():
    from sfumato.ops.triton import fill_cache

GPU = torch.device("cuda", 0)
HIDDEN = 2816  # of the 26B-A4B

SMALL = """
from sfumato.ops.triton import fill_cache
from sfumato.ops.triton.ahead_of_time import jobs
work = [(job, 90) for job in jobs(["sm_90"], ["rms_norm"])]
lacking = [each for each in work if not fill_cache.in_cache(each)]
failure = fill_cache.compile_apart(lacking, 1, 60)
print(len(work), len(lacking), failure, [each for each in work if not fill_cache.in_cache(each)])
"""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A device of sm_90 that is not there, whose kernels are not interpreted."""
    caplog.set_level("INFO")
    monkeypatch.setattr(fill_cache, "interpreting", lambda: False)
    monkeypatch.setattr(fill_cache, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(fill_cache, "own_architecture", lambda device: 90)
    first = lambda name, device, use: fill_cache.candidates(name, "sm_90")[use][0]  # noqa: E731
    monkeypatch.setattr(fill_cache, "tile_for", first)
    monkeypatch.setattr(fill_cache, "usable_cores", lambda: 3)


def test_what_the_cache_lacks_is_compiled(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[set[str], int]] = []

    def compiled(work: list[fill_cache.Item], cores: int, seconds: float) -> str:
        calls.append(({job.kernel for job, _ in work}, cores))
        assert all(number == 90 and not job.candidate for job, number in work)
        return ""

    monkeypatch.setattr(fill_cache, "compile_apart", compiled)
    monkeypatch.setattr(fill_cache, "in_cache", lambda item: item[0].kernel != "linear")
    fill_cache.fill(GPU, HIDDEN)
    assert calls == [({"linear"}, 3)]
    assert [each.message.partition(" kernels")[0] for each in caplog.records] == [
        "compiling 16",
        "compiled 16",
    ]
    fill_cache.fill(GPU, 64)  # a model whose sizes the kernels do not know
    monkeypatch.setattr(fill_cache, "in_cache", lambda item: True)
    fill_cache.fill(GPU, HIDDEN)
    assert len(calls) == 1 and len(caplog.records) == 2


def test_a_failure_is_one_line(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(item: fill_cache.Item) -> bool:
        raise ImportError("no such function of Triton")

    monkeypatch.setattr(fill_cache, "in_cache", fails)
    fill_cache.fill(GPU, HIDDEN)
    assert [each.message for each in caplog.records] == [
        "kernels are compiled where they first run (ImportError: no such function of Triton)"
    ]


def test_a_process_that_fails_or_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hears no request to end is killed."""
    monkeypatch.setattr(fill_cache.sys, "executable", "/bin/false")
    assert fill_cache.compile_apart([], 1, 20) == "the process ended with 1"
    monkeypatch.undo()
    monkeypatch.setattr(fill_cache, "__name__", "timeit")  # runs for as long as it is let
    began = time.monotonic()
    assert fill_cache.compile_apart([], 1, 0.02) == "more than 0.02 s"
    assert time.monotonic() - began < 10


def test_a_kernel_is_compiled_and_then_found(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SMALL], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.strip() == "1 1  []", run.stdout + run.stderr
