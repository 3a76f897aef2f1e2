"""Calls in child processes with a limit of time and of memory, for compilers that hang or crash.

A child is forked where the system can, so that it need not import what its parent did.  Knows no
kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Of one child: its seconds, and the bytes of its address space (None: any number)."""

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
class _Child:
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
        if answer is None:
            code = self.process.exitcode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            answer = None, f"crashed: {how}"
        return answer


def run_bounded(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, limits: Limits
) -> Iterator[Outcome[Item, Result]]:
    """The outcome of each call, as they end; at most `jobs` calls at a time.

    The function and the items must be known to a new process by their names, and results must be
    what pickle takes. What the function raises is a failure. Kills what runs where the caller
    leaves the iteration.
    """
    context: Any = get_context("fork" if "fork" in get_all_start_methods() else "spawn")
    waiting, running = deque(items), dict[Connection, _Child]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                item = waiting.popleft()
                process = context.Process(target=_call, args=(sender, function, item, limits))
                process.start()
                sender.close()  # so that the end of the child ends the pipe
                running[receiver] = _Child(item, process, time.monotonic())
            first = min(child.began for child in running.values()) + limits.seconds
            wait(list(running), max(0.0, first - time.monotonic()) + 0.01)
            yield from _ended(running, limits)
    finally:
        for child in running.values():
            child.kill()


def _ended(running: dict[Connection, _Child], limits: Limits) -> Iterator[Outcome[Any, Any]]:
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
    """In the child, in a group of its own."""
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
