"""A signal reaches the program that it is meant for, or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from tests.support.preloaded import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")


def started(code: str) -> int:
    """The number of a process of which nothing else waits."""
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    process.returncode = 0  # so that subprocess does not wait for it
    return process.pid


def test_a_signal_ends_a_program_that_runs() -> None:
    child = Child(started("import time; time.sleep(60)"))
    timer = threading.Timer(0.2, child.signal, [signal.SIGTERM])
    timer.start()
    assert child.exit_code() == -signal.SIGTERM
    timer.join()


def test_a_number_is_not_signalled_once_another_may_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal that comes while the end is taken note of waits for that, and is then left out."""
    child = Child(started("raise SystemExit(3)"))
    sent: list[int] = []
    given_back: list[int] = []
    wait, threads = os.waitpid, list[threading.Thread]()

    def waitpid(number: int, options: int) -> tuple[int, int]:
        thread = threading.Thread(target=child.signal, args=[signal.SIGKILL])
        thread.start()
        threads.append(thread)
        thread.join(0.1)
        given_back.append(number)
        ended = wait(number, options)
        thread.join(0.1)
        return ended

    def kill(number: int, signal_number: int) -> None:
        sent.append(number)
        assert number not in given_back, "another process may have the number"

    monkeypatch.setattr(os, "waitpid", waitpid)
    monkeypatch.setattr(os, "kill", kill)
    assert child.exit_code() == 3
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    child.signal(signal.SIGTERM)
    assert sent == []
