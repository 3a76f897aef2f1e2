"""All kernels of the 26B-A4B, compiled into Triton's cache on all cores, for `gpu_first.py`.

Compiles for the device's own architecture and does not touch the device, so that processes may be
forked.  What is compiled has the keys of launches, which a test holds: later parts find all of it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from sfumato.ops.triton.ahead_of_time import Job, compile_kernel, jobs
from sfumato.ops.triton.children import Limits, run_bounded
from sfumato.ops.triton.kernel import all_kernels
from sfumato.ops.triton.targets import TARGETS
from sfumato.ops.triton.tiles import candidates

SECONDS = 90  # of one kernel

Item = tuple[Job, int | str]


def compile_all(target: str, number: int | str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every kernel, or those named, in all shapes and with all candidates of tiles. target: whose
    tiles the device has; number: the device's own architecture, as Triton names it."""
    began = time.monotonic()
    all_kernels()  # before processes are forked, so that each has them
    work: list[Item] = [(job, number) for job in jobs([target], names, every=True)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    failed = {}
    for outcome in run_bounded(_compile, work, cores or 1, Limits(SECONDS)):
        if outcome.failure:
            job = outcome.item[0]
            failed[f"{job.kernel} {job.variant or job.use} {job.candidate}"] = outcome.failure
    findings = {"compiled": len(work) - len(failed), "cores": cores, "failures": failed}
    findings["compile_s"] = round(time.monotonic() - began, 1)
    return findings


def _compile(item: Item) -> bool:
    job, number = item
    kernel = all_kernels()[job.kernel].as_variant(job.variant)
    tile = candidates(job.kernel, job.target)[job.use][job.candidate]
    compile_kernel(kernel, tile, replace(TARGETS[job.target], number=number))
    return True
