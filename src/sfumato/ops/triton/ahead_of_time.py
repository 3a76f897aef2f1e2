"""Compiles kernels with the sizes of the 26B-A4B into Triton's cache, for GPUs that need not be
there, and bounds what the compiler does not: each compilation is a process of its own with a limit
of time and memory, since compilers hang and crash too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from sfumato.ops.triton.kernel import FP_FUSION, Kernel, all_kernels, interpreting
from sfumato.ops.triton.tiles import TARGETS, Target, Tile, candidates

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """One compilation: a kernel with the tile of that number, for a target and a use."""

    kernel: str
    target: str
    use: str
    candidate: int
    variant: str = ""  # see `Kernel.variants` and `shapes`
    number: int | str | None = None  # the device's own architecture; None: the target's

    def __str__(self) -> str:
        return f"{self.kernel} {self.variant or self.use} {self.candidate}"


def jobs(
    targets: Sequence[str],
    names: Sequence[str] = (),
    every: bool = False,
    formats: Sequence[str] = (),
    number: int | str | None = None,
) -> Iterator[Job]:
    """The compilations of all kernels, or of those named, for targets, in all their variants: with
    the tiles that serve, or with every candidate, and then in all their shapes too.

    formats: of weights in planes, for which the kernels that read those are compiled too.  number:
    see `Job`."""
    known = all_kernels()
    for name in names or sorted(known):
        variants = known[name].names(formats, every)
        for target in targets:
            for use, tiles in candidates(name, target).items():
                for at in range(len(tiles) if every else 1):
                    for variant in variants:
                        yield Job(name, target, use, at, variant, number)


def kernel_of(job: Job) -> tuple[Kernel, Tile]:
    """What a job compiles."""
    tile = candidates(job.kernel, job.target)[job.use][job.candidate]
    return all_kernels()[job.kernel].as_variant(job.variant), tile


def compile_job(job: Job) -> None:
    """Compiles a job into Triton's cache. Raises what the compilers raise."""
    target = TARGETS[job.target]
    target = replace(target, number=job.number or target.number)
    compile_source(*source_of(*kernel_of(job), target), target)


def compile_source(source: Any, options: dict[str, Any], target: Target) -> Any:
    """What Triton makes of a source; needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET: unset it, interpreted kernels cannot be compiled")
    where = GPUTarget(target.backend, target.number, target.warp)
    return triton.compile(source, target=where, options=options)


def source_of(kernel: Kernel, tile: Tile, target: Target) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, and its options: those of a launch, so that a launch on such a device
    finds the result in Triton's cache."""
    from triton.compiler import ASTSource

    constants = {**kernel.sizes, **tile.constants, "UPCAST": False}
    if "DESCRIPTORS" in kernel.function.arg_names:
        constants["DESCRIPTORS"] = target.copies
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(kernel.function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            if _constants_have_attributes(kernel.function):
                aligned[(place,)] = []
            continue
        kind = kernel.types[name].format_map(constants)
        if kind.startswith("tensordesc") and not constants.get("DESCRIPTORS", True):
            kind = f"*{kind.partition('<')[2].partition('[')[0]}:16"
        signature[name], _, multiple = kind.partition(":")
        if multiple:
            aligned[(place,)] = [["tt.divisibility", int(multiple)]]
            if target.backend == "hip" and kind.startswith("*"):
                # A launch says so of a tensor of less than 2 GB, as nearly all are.
                aligned[(place,)].append(["tt.pointer_range", 32])
    unknown = set(kernel.types) - set(signature) | set(constants) - set(signature)
    assert not unknown, f"{kernel.name}: has no parameter {', '.join(sorted(unknown))}"
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": FP_FUSION}
    return ASTSource(kernel.function, signature, constants, aligned), options


@cache
def _constants_have_attributes(function: Any) -> bool:
    """Whether launches give the compiler an empty list of attributes for a constant, which counts
    in the key of the cache: Triton 3.9 does, 3.6 does not."""
    backend = SimpleNamespace(parse_options=lambda given: None, parse_attr=lambda attribute: [])
    *_, attributes = function._pack_args(backend, {}, {"": 1}, [("constexpr", 1)], {})
    return bool(attributes)


@dataclass(frozen=True)
class Limits:
    """Limits of one child: its seconds, and the bytes of its address space (None: any number)."""

    seconds: float
    nbytes: int | None = None


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """What a call gave: a result, or None and why there is none."""

    item: Item
    result: Result | None
    failure: str
    seconds: float


@dataclass(frozen=True)
class Child:
    item: Any
    process: Any
    began: float

    def kill(self) -> None:
        """With the compilers that the child has started, which are of its group."""
        if not self._was_waited_for():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def _was_waited_for(self) -> bool:
        """Whether its number may be another process's: `multiprocessing` waits for children that
        have ended whenever it starts one."""
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return False
        try:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def answer(self, receiver: Connection, limits: Limits) -> tuple[Any, str]:
        """The result and the failure; ends the process."""
        answer: tuple[Any, str] | None = None
        with contextlib.suppress(EOFError):
            late = None, f"time-out: took more than {limits.seconds:g} s"
            answer = receiver.recv() if receiver.poll() else late
        self.kill()  # a process that is ending keeps its exit code
        code = self.process.exitcode
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return answer or (None, f"crashed: {ended}")


def begin(item: Any, function: Callable[[Any], Any], limits: Limits) -> tuple[Connection, Child]:
    """Calls a function of an item in a process of its own, in a group of its own; its answer
    arrives at the connection."""
    context: Any = get_context("fork" if "fork" in get_all_start_methods() else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, item, limits))
    process.start()
    sender.close()  # so that the end of the child ends the pipe
    return receiver, Child(item, process, time.monotonic())


def run_bounded(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, limits: Limits
) -> Iterator[Outcome[Item, Result]]:
    """The outcome of each call, as they end; at most `jobs` calls at a time.

    The function and the items must be known to a new process by their names, and results must be
    what pickle takes. What the function raises is a failure. Kills what runs where the caller
    leaves the iteration.
    """
    waiting, running = deque(items), dict[Connection, Child]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                item = waiting.popleft()
                receiver, child = begin(item, function, limits)
                running[receiver] = child
            first = min(child.began for child in running.values()) + limits.seconds
            wait(list(running), max(0.0, first - time.monotonic()) + 0.01)
            yield from _ended(running, limits)
    finally:
        for child in running.values():
            child.kill()


def _ended(running: dict[Connection, Child], limits: Limits) -> Iterator[Outcome[Any, Any]]:
    """Takes out the children that have answered, have ended or have had their time."""
    for receiver, child in list(running.items()):
        seconds = time.monotonic() - child.began
        if not receiver.poll() and seconds < limits.seconds:
            continue
        del running[receiver]
        result, failure = child.answer(receiver, limits)
        receiver.close()
        yield Outcome(child.item, result, failure, seconds)


def _call(sender: Connection, function: Callable[[Any], Any], item: Any, limits: Limits) -> None:
    """In the child."""
    os.setpgid(0, 0)
    if limits.nbytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limits.nbytes, limits.nbytes))
    try:
        answer = function(item), ""
    except Exception as error:
        answer = None, ": ".join(filter(None, (type(error).__name__, str(error).strip()[-400:])))
    sender.send(answer)
    sender.close()


_MEMORY = 2 << 30  # bytes of the machine's memory for each child, several times what one takes


def usable_cores() -> int:
    """The cores that this process may use, and no more than have memory for a compilation."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _MEMORY))


def compile_all(
    work: Sequence[Job], seconds: float, limits: Limits = Limits(90, 16 << 30)
) -> Iterator[Outcome[Job, None]]:
    """The outcome of each compilation, on all cores, as they end, until the time is up. Forks: call
    it before the device is used."""
    all_kernels()  # before processes are forked, so that each has them
    end = time.monotonic() + seconds
    for outcome in run_bounded(compile_job, work, usable_cores(), limits):
        yield outcome
        if time.monotonic() > end:
            return
