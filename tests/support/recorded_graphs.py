"""A stand-in for CUDA graphs on a CPU: records the operations of torch, and repeats them.

As a graph does, it repeats operations on the memory that they had, with the numbers that the host
gave them in the capture.  Python does not run again, and nothing of the capture is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default")


class _Recorder(TorchDispatchMode):
    """Runs operations, keeps them, and can undo what they wrote into memory from before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: all of it, and a copy
        self._own: set[int] = set()  # storages made in the capture
        self._kept: list[Tensor] = []  # so that no address is given out twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert str(func) not in _READS, f"{func} reads on the host, which no graph can hold"
        self._save(func, args, kwargs)
        out = func(*args, **kwargs)
        inputs = {_address(t) for t in _tensors((args, kwargs))}
        self._own |= {_address(t) for t in _tensors(out)} - inputs - self._before.keys()
        self._kept += _tensors(out)
        self.operations.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for memory, copy in self._before.values():
            memory.copy_(copy)

    @torch.no_grad()
    def repeat(self) -> None:
        for func, args, kwargs, out in self.operations:
            for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(out), strict=True):
                if _address(new) != _address(old):  # no view, and not in place
                    old.copy_(new)

    def _save(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(given):
                at = _address(tensor)
                if at not in self._own and at not in self._before:
                    memory = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self._before[at] = memory, memory.clone()


class RecordedGraphs:
    """A `GraphBackend`. capture_error and replay_error are raised by the next of each."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.capture_error: Exception | None = None
        self.replay_error: Exception | None = None

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        error, self.capture_error = self.capture_error, None
        if error is not None:
            raise error
        again = self._record(function)
        self.captures += 1

        def replay() -> None:
            error, self.replay_error = self.replay_error, None
            if error is not None:
                raise error
            self.replays += 1
            again()

        return replay

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        with _Recorder() as recorder:
            function()
        recorder.undo()
        return recorder.repeat


class RepeatedCalls(RecordedGraphs):
    """Calls the function again, at the speed of the CPU's own operations."""

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
