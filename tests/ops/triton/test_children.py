"""Calls in child processes that answer, raise, crash or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing import get_context

import pytest

from sfumato.ops.triton.ahead_of_time import Child, Limits, run_bounded


def behave(how: str) -> str:
    if how == "raises":
        raise ValueError("what was wrong")
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)  # as a system without memory does
    if how == "leaves":
        os._exit(3)
    if how == "hangs":
        subprocess.run(["sleep", "60"], check=False)
    if how == "grows":
        return str(len(bytearray(1 << 40)))
    return how * 100_000  # more than a pipe holds


def test_every_call_has_an_outcome() -> None:
    began = time.monotonic()
    kinds = ["answers", "raises", "crashes", "leaves", "hangs", "grows"]
    outcomes = list(run_bounded(behave, kinds, 3, Limits(2.0, 1 << 36)))
    assert time.monotonic() - began < 20
    assert {each.item: each.failure for each in outcomes} == {
        "answers": "",
        "raises": "ValueError: what was wrong",
        "crashes": "crashed: SIGKILL",
        "leaves": "crashed: exit code 3",
        "hangs": "time-out: took more than 2 s",
        "grows": "MemoryError",
    }
    results = {each.item: each.result for each in outcomes}
    assert results.pop("answers") == "answers" * 100_000 and set(results.values()) == {None}
    assert [each for each in outcomes if each.seconds >= 2] == [outcomes[-1]]


def test_what_runs_is_ended_with_its_caller() -> None:
    calls = run_bounded(behave, ["hangs", "answers"], 2, Limits(50))
    assert next(calls).item == "answers"
    began = time.monotonic()
    calls.close()
    assert time.monotonic() - began < 5


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system cannot tell")
def test_a_group_is_not_killed_once_another_may_have_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`multiprocessing` waits for a child that has ended as soon as another is started."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, signal: killed.append(group))
    for waits in (True, False):
        process = get_context("fork").Process(target=os._exit, args=(0,))
        process.start()
        if waits:
            process.join()
        Child(None, process, 0.0).kill()
        assert killed == ([] if waits else [process.pid])
