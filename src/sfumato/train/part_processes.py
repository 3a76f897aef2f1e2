"""The parts of a step, each in a process of its own, on weights in shared memory.

In threads of one process the parts wait for each other's turn in the interpreter, since most of a
step's operations are small.  Knows no data, no objective and no optimiser.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import torch
from torch import Tensor

Gradients = tuple[tuple[Tensor, ...], dict[str, float]]
"""Of every parameter that is learned, and the losses by name."""
Work = Callable[[int], Iterator[Gradients]]
"""What a part, by its number, computes in its steps, one after another."""


class PartProcesses:
    """Computes the parts of steps as a context manager. Where the system cannot fork, the parts
    follow each other in this process, with the same results."""

    def __init__(self, learned: Sequence[Tensor], work: Work, count: int) -> None:
        """learned: the parameters, which move to shared memory; work: computes their gradients;
        count: of the parts."""
        self._learned, self._processes, self._pipes = learned, [], []
        self._here: list[Iterator[Gradients]] = []
        if "fork" not in multiprocessing.get_all_start_methods():
            self._here = [work(part) for part in range(count)]
            return
        for parameter in learned:
            parameter.data = parameter.data.share_memory_()
        self._shared = [
            [torch.zeros_like(parameter.data).share_memory_() for parameter in learned]
            for _ in range(count)
        ]
        context = multiprocessing.get_context("fork")
        for part in range(count):
            pipe, end = context.Pipe()
            arguments = (end, work, part, self._shared[part])
            process = context.Process(target=_compute, args=arguments, daemon=True)
            process.start()
            # The child's alone from now on: where it dies, reading here ends.
            end.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def step(self) -> list[Gradients]:
        """The next gradients of all parts, valid until the next call.

        Raises what the work of a part raises, and RuntimeError where its process has died."""
        if self._here:
            return [next(each) for each in self._here]
        for pipe in self._pipes:
            pipe.send(True)
        losses = [_received(pipe) for pipe in self._pipes]
        return [(tuple(shared), each) for shared, each in zip(self._shared, losses, strict=True)]

    def __enter__(self) -> PartProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.terminate()
            process.join()


def _received(pipe: Connection) -> dict[str, float]:
    try:
        result = pipe.recv()
    except EOFError:
        raise RuntimeError("train: a process that computes gradients has died") from None
    if isinstance(result, BaseException):
        raise result
    losses: dict[str, float] = result
    return losses


def _compute(pipe: Connection, work: Work, part: int, shared: Sequence[Tensor]) -> None:
    """The life of a process: one step's gradients for every message."""
    # The parts share the processor's cores; and threads of OpenMP do not outlive a fork.
    torch.set_num_threads(1)
    steps = work(part)
    try:
        while pipe.recv():
            gradients, losses = next(steps)
            for place, gradient in zip(shared, gradients, strict=True):
                place.copy_(gradient)
            pipe.send(losses)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(error)
