"""Tries kernels in processes that a wrong one may end: before a start, and for benchmarks.

A process of its own, which does not touch the device, first compiles into Triton's cache what the
26B-A4B launches there, on all cores.  Then a child for each operation tries it, so that one that
crashes, hangs or leaves the device in an error fails alone.  Each result is written as soon as it
is known.  What is not compiled when the time is up, or fails, is compiled where it is first tried.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch

from sfumato.ops.triton import twins
from sfumato.ops.triton.ahead_of_time import (
    Job,
    Limits,
    compile_all,
    jobs,
    kernel_of,
    run_bounded,
)
from sfumato.ops.triton.kernel import all_kernels
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.self_test import Sizes, Trial, why_wrong
from sfumato.ops.triton.tiles import architecture, own_architecture, tile_for

log = logging.getLogger(__name__)

COMPILING = 60.0
"""Seconds for all compilations."""
EACH = Limits(300.0)
"""Limits of one operation, whose kernels may have to be compiled."""
ALL_SECONDS = 1800.0
"""Seconds for the process."""


def serving(device: torch.device, hidden: int, formats: Collection[str] = ()) -> list[Job]:
    """The compilations of all kernels in all shapes, with the tiles that serve on a device; of
    those that read planes or codes, for these formats.

    hidden: size of a hidden state of the model; where it is another than that of which the kernels
    know the sizes, there is nothing.
    """
    target, number = architecture(device), own_architecture(device)
    if target is None or all_kernels()["listed_scores"].sizes["HIDDEN"] != hidden:
        return []
    known = sorted(LAYOUTS.keys() & set(formats))
    return [
        job
        for job in jobs([target], every=True, formats=known, number=number)
        if _wanted(job, device, formats)
    ]


def _wanted(job: Job, device: torch.device, formats: Collection[str]) -> bool:
    """Whether a device launches this with the tiles that serve there, of weights of formats."""
    kernel, tile = kernel_of(job)
    # No network of these sizes has SiLU.
    if kernel.sizes.get("SILU") or tile != tile_for(job.kernel, device, job.use):
        return False
    if kernel.format:
        return kernel.format in formats
    return not kernel.columns or job.variant.partition(": ")[0] in formats


def run(trial: Trial, formats: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """Why each operation fails on a GPU, empty where it passes: in a process of its own, which ends
    with all its children. formats: of the model's quantized weights."""
    began, work = time.monotonic(), serving(trial.device, trial.sizes.hidden, formats)
    log.info("trying %d operations; %d kernels are compiled first", len(names), len(work))
    given = {
        "work": [asdict(job) for job in work],
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


def main() -> None:
    """Reads what to do from standard input; writes a line of JSON for each operation."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda number, frame: sys.exit(1))  # ends the children too
    given: dict[str, Any] = json.loads(sys.stdin.read())
    signal.setitimer(signal.ITIMER_REAL, ALL_SECONDS)  # whatever becomes of the parent
    for _ in compile_all([Job(**job) for job in given["work"]], COMPILING):
        pass
    known = twins(name.partition(" ")[2] for name in given["names"])
    trial = Trial(torch.device(given["device"]), Sizes(**given["sizes"]))

    def check(name: str) -> str:
        return why_wrong(known[name], trial)

    for tried in run_bounded(check, given["names"], 1, EACH):
        print(json.dumps((tried.item, tried.failure or tried.result)), flush=True)


if __name__ == "__main__":
    main()
