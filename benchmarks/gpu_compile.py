"""All kernels of the 26B-A4B, compiled into Triton's cache on all cores, for `gpu_first.py`.

Compiles for the device's own architecture and does not touch the device, so that processes may be
forked.  What is compiled has the keys of launches, which a test holds: later parts find all of it.
A start does the same with the tiles that serve (`tries`); here, all candidates are compiled.
"""

from __future__ import annotations

import time
from typing import Any

from sfumato.ops.triton.ahead_of_time import compile_all, jobs, usable_cores

SECONDS = 600.0
FORMATS = ("Q4_K", "Q5_0", "Q6_K", "Q8_0")
"""Of weights in planes, those of Q4_K_M and Q8_0 files."""


def compile_for(target: str, number: int | str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every kernel, or those named, in all shapes and with all candidates of tiles. target: whose
    tiles the device has; number: the device's own architecture, as Triton names it."""
    began = time.monotonic()
    work = list(jobs([target], names, every=True, formats=FORMATS, number=number))
    failed = {}
    for outcome in compile_all(work, SECONDS):
        if outcome.failure:
            failed[str(outcome.item)] = outcome.failure
    findings = {"compiled": len(work) - len(failed), "cores": usable_cores(), "failures": failed}
    findings["compile_s"] = round(time.monotonic() - began, 1)
    return findings
