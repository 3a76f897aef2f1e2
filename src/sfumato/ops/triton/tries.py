"""Tries kernels in processes that a wrong one may end: before a start, and for benchmarks.

A process of its own, which does not touch the device, first compiles what Triton's cache lacks on
all cores, each kernel in a child that is bounded in time and memory. Then a child tries one
operation after another; where one crashes, hangs or leaves the device in an error, a new child
goes on with the next. Each result is written as soon as it is known. What is not compiled when the
time is up, or fails, is compiled where it is first tried.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from sfumato.ops.triton import fill_cache, twins
from sfumato.ops.triton.ahead_of_time import Job, begin
from sfumato.ops.triton.self_test import Sizes, Trial, why_wrong

log = logging.getLogger(__name__)

SECONDS = 300.0
"""Seconds for one operation, whose kernels may have to be compiled."""
ALL_SECONDS = 1800.0
"""Seconds for the process."""


def in_turn(
    names: Sequence[str],
    check: Callable[[str], str],
    responds: Callable[[], bool],
    seconds: float = SECONDS,
) -> Iterator[tuple[str, str]]:
    """Each name and why its check failed, empty where it passed, as they end.

    check: why an operation is wrong.  responds: whether the device is still of use after that.
    """
    left = list(names)
    while left:
        receiver, child = begin(None, _try, tuple(left), check, responds)
        goes_on = True
        try:
            while left and goes_on:
                why, goes_on = f"took more than {seconds:g} s", False
                if receiver.poll(seconds):
                    answer = None
                    with suppress(EOFError):
                        answer = receiver.recv()
                    why, goes_on = answer or (child.crash(), False)
                yield left.pop(0), why
        finally:
            child.kill()
            receiver.close()


def _try(
    sender: Connection,
    names: Sequence[str],
    check: Callable[[str], str],
    responds: Callable[[], bool],
) -> None:
    """In the child."""
    for name in names:
        why = check(name)
        goes_on = not why or responds()
        sender.send((why, goes_on))
        if not goes_on:
            return


def run(trial: Trial, formats: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """Why each operation fails on a GPU, empty where it passes: in a process of its own, which ends
    with all its children. formats: of the model's quantized weights."""
    began, work = time.monotonic(), fill_cache.serving(trial.device, trial.sizes.hidden, formats)
    log.info("trying %d operations; %d kernels are compiled first", len(names), len(work))
    given = {
        "work": [(asdict(job), number) for job, number in work],
        "device": str(trial.device),
        "sizes": asdict(trial.wanted),
        "names": list(names),
    }
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    failure = f"not tried in {ALL_SECONDS:g} s"
    try:
        out, errors = process.communicate(json.dumps(given), ALL_SECONDS)
        last = errors.strip().splitlines()[-1:] or [""]
        failure = f"its process ended with {process.returncode} {last[0][:200]}".strip()
    except subprocess.TimeoutExpired:
        out = _ended(process)
    except BaseException:
        _ended(process)
        raise
    results = dict(json.loads(line) for line in out.splitlines() if line.endswith("]"))
    log.info("tried %d operations in %.1f s", len(results), time.monotonic() - began)
    return {name: results.get(name, failure) for name in names}


def _ended(process: subprocess.Popen[str]) -> str:
    """Asks first, so that the process kills its children; what it wrote."""
    process.terminate()
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def responds(device: torch.device) -> bool:
    """Whether a device still computes: after some errors no call of the process succeeds."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1.0
    except RuntimeError:
        return False


def main() -> None:
    """Reads what to do from standard input; writes a line of JSON for each operation."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda number, frame: sys.exit(1))  # ends the children too
    given: dict[str, Any] = json.loads(sys.stdin.read())
    signal.setitimer(signal.ITIMER_REAL, ALL_SECONDS)  # whatever becomes of the parent
    work = [(Job(**job), number) for job, number in given["work"]]
    for _ in fill_cache.compile_all(work, fill_cache.SECONDS):
        pass
    names, device = given["names"], torch.device(given["device"])
    known = twins(name.partition(" ")[2] for name in names)
    trial = Trial(device, Sizes(**given["sizes"]))

    def check(name: str) -> str:
        return why_wrong(known[name], trial)

    for each in in_turn(names, check, partial(responds, device)):
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
