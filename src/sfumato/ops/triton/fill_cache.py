"""Compiles into Triton's cache, before a start, the kernels of the 26B-A4B that the cache lacks.

A process of its own compiles them, each kernel in a child, on all cores: it has not touched the
device, and so may be forked and bounded in memory.  What is not compiled when the time is up, or
fails, is compiled where it first runs, as without this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
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
from sfumato.ops.triton.kernel import all_kernels, interpreting
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import (
    TARGETS,
    Target,
    architecture,
    candidates,
    own_architecture,
    tile_for,
)

log = logging.getLogger(__name__)

Item = tuple[Job, int | str]
"""A compilation, and the device's own architecture, as Triton names it."""

LIMITS = Limits(90, 16 << 30)
"""Limits of the compilation of one kernel."""
SECONDS = 60.0
"""Seconds for all kernels before a start."""
_MEMORY = 2 << 30  # bytes of the machine's memory for each child, several times what one takes


def fill(
    device: torch.device, hidden: int, seconds: float = SECONDS, formats: Collection[str] = ()
) -> None:
    """Compiles what a device's launches would not find in Triton's cache.

    hidden: size of a hidden state of the model; where it is another than that of which the kernels
    know the sizes, nothing is compiled.  seconds: of all, at most; then the children are killed.
    formats: of the model's quantized weights.  Raises nothing: a failure is one log line.
    """
    if device.type != "cuda" or interpreting() or architecture(device) is None:
        return
    try:
        if all_kernels()["listed_scores"].sizes["HIDDEN"] == hidden:
            _fill([item for item in serving(device, formats) if not in_cache(item)], seconds)
    except Exception as error:  # Triton's own functions, a system without memory for processes
        why = f"{type(error).__name__}: {error}"
        log.warning("kernels are compiled where they first run (%s)", why)


def _fill(work: list[Item], seconds: float) -> None:
    if not work:
        return
    cores = min(usable_cores(), len(work))
    log.info("compiling %d kernels on %d cores, once", len(work), cores)
    began = time.monotonic()
    failure = compile_apart(work, cores, seconds)
    elapsed = time.monotonic() - began
    if failure:
        text = "not all kernels were compiled in %.1f s; the others are where they first run (%s)"
        log.warning(text, elapsed, failure)
    else:
        log.info("compiled %d kernels in %.1f s", len(work), elapsed)


def serving(device: torch.device, formats: Collection[str] = ()) -> list[Item]:
    """The compilations of all kernels in all shapes, with the tiles that serve on a device; of
    those that read planes or codes, for these formats."""
    target, number = architecture(device), own_architecture(device)
    assert target is not None
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


def in_cache(item: Item) -> bool:
    """Whether a launch would find this in Triton's cache; takes milliseconds."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler, make_backend
    from triton.runtime.cache import get_cache_manager

    source, options, target = _parts(item)
    backend = make_backend(GPUTarget(target.backend, target.number, target.warp))
    variables = compiler.get_cache_invalidating_env_vars()
    parsed = backend.parse_options(dict(options))
    key = compiler.get_cache_key(source, backend, parsed, env_vars=variables)
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    name = f"{source.name[:150]}.json"
    return name in (manager.get_group(name) or {})


def usable_cores() -> int:
    """The cores that this process may use, and no more than have memory for a compilation."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores or 1, memory // _MEMORY))


def compile_all(work: Iterable[Item], cores: int, limits: Limits) -> Iterator[Outcome[Item, bool]]:
    """The outcome of each compilation, as they end. Forks: call it before the device is used."""
    all_kernels()  # before processes are forked, so that each has them
    return run_bounded(compile_item, work, cores, limits)


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


def compile_apart(work: list[Item], cores: int, seconds: float) -> str:
    """Compiles in a process of its own, which ends with all its children after `seconds`; why not
    all is compiled, empty where all is."""
    given = {"work": [(asdict(job), number) for job, number in work], "cores": cores}
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        out, _ = process.communicate(json.dumps({**given, "seconds": seconds}), seconds)
    except subprocess.TimeoutExpired:
        return f"more than {seconds:g} s"
    finally:
        _end(process)
    if process.returncode:
        return f"the process ended with {process.returncode}"
    failures: list[str] = json.loads(out)
    return f"{len(failures)} failed, the first: {failures[0]}" if failures else ""


def _end(process: subprocess.Popen[str]) -> None:
    """Asks first, so that the process kills its children."""
    process.terminate()
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def main() -> None:
    """Reads the work from standard input; prints, as JSON, what failed."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda number, frame: sys.exit(1))  # ends the children too
    given: dict[str, Any] = json.loads(sys.stdin.read())
    signal.setitimer(signal.ITIMER_REAL, given["seconds"])  # whatever becomes of the parent
    work: list[Item] = [(Job(**each), number) for each, number in given["work"]]
    failures = []
    for outcome in compile_all(work, given["cores"], LIMITS):
        if outcome.failure:
            failures.append(f"{outcome.item[0]}: {outcome.failure}")
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
