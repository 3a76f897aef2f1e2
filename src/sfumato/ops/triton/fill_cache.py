"""Compiles into Triton's cache the kernels of the 26B-A4B that serve on a device, on all cores.

A launch then finds them, and compiles none; so does a second call, in milliseconds a kernel. What
fails here is compiled where it first runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sfumato.ops.triton.ahead_of_time import (
    Job,
    Limits,
    Outcome,
    compile_source,
    jobs,
    run_bounded,
    source_of,
)
from sfumato.ops.triton.kernel import all_kernels
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import (
    TARGETS,
    Target,
    architecture,
    candidates,
    own_architecture,
    tile_for,
)

Item = tuple[Job, int | str]
"""A compilation, and the device's own architecture, as Triton names it."""

LIMITS = Limits(90, 16 << 30)
"""Limits of the compilation of one kernel."""
SECONDS = 60.0
"""Seconds for all kernels before a start."""
_MEMORY = 2 << 30  # bytes of the machine's memory for each child, several times what one takes


def serving(device: torch.device, hidden: int, formats: Collection[str] = ()) -> list[Item]:
    """The compilations of all kernels in all shapes, with the tiles that serve on a device; of
    those that read planes or codes, for these formats.

    hidden: size of a hidden state of the model; where it is another than that of which the kernels
    know the sizes, there is nothing.
    """
    target, number = architecture(device), own_architecture(device)
    if target is None or all_kernels()["listed_scores"].sizes["HIDDEN"] != hidden:
        return []
    known = sorted(LAYOUTS.keys() & set(formats))
    work = jobs([target], every=True, formats=known)
    return [(job, number) for job in work if _wanted(job, device, formats)]


def _wanted(job: Job, device: torch.device, formats: Collection[str]) -> bool:
    """Whether a device launches this with the tiles that serve there, of weights of formats."""
    kernel = all_kernels()[job.kernel]
    tile = candidates(job.kernel, job.target)[job.use][job.candidate]
    of_others = kernel.as_variant(job.variant).sizes.get("SILU")  # no network of these sizes
    if of_others or tile != tile_for(job.kernel, device, job.use):
        return False
    if kernel.format:
        return kernel.format in formats
    return not kernel.columns or job.variant.partition(": ")[0] in formats


def usable_cores() -> int:
    """The cores that this process may use, and no more than have memory for a compilation."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores or 1, memory // _MEMORY))


def compile_all(work: Sequence[Item], seconds: float) -> Iterator[Outcome[Item, bool]]:
    """The outcome of each compilation, as they end, until the time is up. Forks: call it before the
    device is used."""
    all_kernels()  # before processes are forked, so that each has them
    end = time.monotonic() + seconds
    for outcome in run_bounded(compile_item, work, usable_cores(), LIMITS):
        yield outcome
        if time.monotonic() > end:
            return


def compile_item(item: Item) -> bool:
    """Compiles a kernel into Triton's cache. Raises what the compilers raise."""
    compile_source(*_parts(item))
    return True


def _parts(item: Item) -> tuple[Any, dict[str, Any], Target]:
    """What Triton compiles, its options, and for what."""
    job, number = item
    target = replace(TARGETS[job.target], number=number)
    kernel = all_kernels()[job.kernel].as_variant(job.variant)
    tile = candidates(job.kernel, job.target)[job.use][job.candidate]
    return *source_of(kernel, tile, target), target
