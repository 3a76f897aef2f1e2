"""Operations are tried in processes that a wrong one may end, after what Triton's cache lacks has
been compiled: with stand-ins for operations that crash, hang or fail."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from sfumato.ops.triton.kernel import installed
from sfumato.ops.triton.self_test import KernelTwin, Sizes, Trial

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
if installed():
    from sfumato.ops import triton
    from sfumato.ops.triton import self_test, tries
    from sfumato.ops.triton.ahead_of_time import Limits
    from sfumato.ops.triton.tiles import candidates

GPU = torch.device("cuda", 0)
HIDDEN = 2816  # of the 26B-A4B


def test_what_a_process_wrote_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fails, or takes too long and hears no request to end."""
    monkeypatch.setattr(tries, "serving", lambda *given: [])
    real, code = subprocess.Popen, ""
    written = 'import sys; sys.stdin.read(); print(\'["a", ""]\\n["b", "wrong"]\', flush=True); '

    def run(code: str) -> dict[str, str]:
        def begin(command: list[str], **others: Any) -> Any:
            return real([sys.executable, "-S", "-c", written + code], **others)

        monkeypatch.setattr(tries.subprocess, "Popen", begin)
        return tries.run(Trial(GPU), (), ["a", "b", "c"])

    assert run('print(\'["c", ""]\')') == {"a": "", "b": "wrong", "c": ""}
    ended = "its process ended with 3 no device"
    code = "print('no device', file=sys.stderr); sys.exit(3)"
    assert run(code) == {"a": "", "b": "wrong", "c": ended}
    monkeypatch.setattr(tries, "ALL_SECONDS", 0.5)
    code = "import signal, time; signal.signal(15, lambda *of: sys.exit(1)); time.sleep(60)"
    assert run(code) == {"a": "", "b": "wrong", "c": "not tried in 0.5 s"}


def test_the_process_tries_what_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU in a device's place, with the widths that it is given, and operations that fail each in
    a way of its own."""

    def check(trial: Trial) -> None:
        assert trial.wanted.hidden == 96 and trial.device == torch.device("cpu")
        assert trial.wanted.products == [[96, 64]], "as JSON has it"

    def crash(trial: Trial) -> None:
        faulthandler.disable()  # pytest's
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(trial: Trial) -> None:
        subprocess.run(["sleep", "60"], check=False)

    def fail(trial: Trial) -> None:
        raise RuntimeError("out of memory")

    checks = {"route": crash, "experts": hang, "linear": check, "attend": fail, "own_scores": check}
    twins = {name: KernelTwin(name, max, bool, each) for name, each in checks.items()}
    given = {"work": [], "device": "cpu", "names": [*twins],
             "sizes": {"hidden": 96, "products": [[96, 64]]}}  # fmt: skip
    monkeypatch.setattr(tries, "twins", lambda formats: twins)
    monkeypatch.setattr(tries, "EACH", Limits(0.5))
    monkeypatch.setattr(sys.stdin, "read", lambda: json.dumps(given), raising=False)
    with restored_signals():
        tries.main()
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results == [
        *(["route", "crashed: SIGSEGV"], ["experts", "time-out: took more than 0.5 s"]),
        *(["linear", ""], ["attend", "RuntimeError: out of memory"], ["own_scores", ""]),
    ]


class restored_signals:
    """The signals of this process as they were."""

    def __enter__(self) -> None:
        self._before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM)}
        self._timer = signal.getitimer(signal.ITIMER_REAL)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        for number, handler in self._before.items():
            signal.signal(number, handler)


def test_a_start_tries_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of the model and the formats of its weights."""
    starts: list[tuple[Trial, frozenset[str], list[str]]] = []

    def run(trial: Trial, formats: frozenset[str], names: list[str]) -> dict[str, str]:
        starts.append((trial, formats, names))
        return {name: "crashed: SIGSEGV" if name == "route" else "" for name in names}

    monkeypatch.setattr(tries, "run", run)
    monkeypatch.setattr(self_test, "usable", lambda device: True)
    monkeypatch.setattr(self_test, "slower", lambda operation, device: operation == "rms_norm")
    for name in ("_passed", "_failed", "_tried_with"):
        monkeypatch.setattr(self_test, name, {})
    monkeypatch.setattr(self_test, "kept", lambda device: frozenset(("linear",)))
    monkeypatch.setattr(self_test, "_keep", lambda device: None)
    sizes, formats = Sizes(hidden=512), frozenset(("Q8_0",))
    served = triton.prepare(GPU, sizes, formats)
    ((trial, formats_given, names),) = starts
    assert (trial, formats_given) == (Trial(GPU, sizes), formats)
    assert {"linear Q8_0", "route", "attend"} <= set(names)
    assert not {"linear", "rms_norm"} & set(names), "it passed before, and torch is faster"
    assert {"linear", "linear Q8_0"} <= served and not {"route", "rms_norm"} & served
    assert triton.prepare(GPU, sizes, formats) == served and len(starts) == 1


def test_what_is_compiled_before_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a device of sm_90 that is not there, in all shapes, with the tiles that serve;
    those of formats that the model has."""
    monkeypatch.setattr(tries, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tries, "own_architecture", lambda device: 90)
    first = lambda name, device, use: candidates(name, "sm_90")[use][0]  # noqa: E731
    monkeypatch.setattr(tries, "tile_for", first)
    work = tries.serving(GPU, HIDDEN, ("Q8_0",))
    assert all(job.number == 90 and not job.candidate for job in work)
    kernels = {job.kernel for job in work}
    assert {"linear", "linear_planes", "router_scores"} <= kernels and "linear_fp8" not in kernels
    assert sum(job.kernel == "linear" for job in work) == 20  # seven alone and three of several
    assert not tries.serving(GPU, 64), "a model whose sizes the kernels do not know"
