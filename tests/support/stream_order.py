"""Whether work on several streams has an order wherever it shares memory.

A device does what one stream is given in order, and has no order between streams but where one
waits for another. `checked_streams` puts a stand-in in the place of torch's streams, for tensors of
a CPU. All is computed at once, in the order in which it is given, so that results are right
whatever waits are missing; what is missing is found by vector clocks: a stream knows of each stream
how many operations come before what it will be given next. Two operations that touch one storage,
of which one writes it, must be in order.

An operation is one of torch's, or an interpreted kernel, whose loads and stores say what it
touches. Memory is that of torch's allocator for CUDA: what Python has freed is given out again by
the stream that allocated it, at its next allocation at the earliest, and all that touched it must
come before that. Knows no time: what a device really does at once, only a device shows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.ops import gpu, torch_device
from sfumato.ops.triton import kernel


class Unordered(AssertionError):
    """Two operations that share memory, one of which may come before or after the other."""


@dataclass(frozen=True)
class Use:
    """The operation that a stream was given as its `number`-th."""

    operation: str
    stream: Stream
    number: int

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream.name}"


class Stream:
    """Stands for `torch.Stream`."""

    def __init__(self, check: StreamCheck, stream_id: int) -> None:
        self.device, self.stream_id = torch.device("cpu"), stream_id
        self.name = "the side stream" if stream_id else "the main stream"
        self.clock: Counter[int] = Counter()  # operations of each stream that come before
        self._check, self._outer = check, self

    def wait_stream(self, other: Stream) -> None:
        if self.name not in self._check.deaf:
            self.clock |= other.clock

    def __enter__(self) -> None:
        self._outer, self._check.current = self._check.current, self

    def __exit__(self, *_: object) -> None:
        self._check.current = self._outer

    def is_behind(self, use: Use) -> bool:
        """Whether what it is given next comes after that."""
        return use.number <= self.clock[use.stream.stream_id]


@dataclass
class Memory:
    """A storage: who allocated it, and what touched it."""

    allocated: Use
    written: Use
    read: dict[int, Use] = field(default_factory=dict)
    """Since then: the last of each stream."""


class StreamCheck(TorchDispatchMode):
    """Notes what every stream is given. Raises Unordered as soon as two have no order."""

    def __init__(self, deaf: Collection[str] = ()) -> None:
        """deaf: streams whose waits for others do nothing."""
        super().__init__()
        self.deaf, self.streams = deaf, [Stream(self, 0)]
        self.current = self.streams[0]
        self.operations: Counter[str] = Counter()  # that touched memory, by stream
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []
        self._launching = False

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, written = _storages((args, kwargs)), _storages(_written(func, args, kwargs))
        out = func(*args, **kwargs)
        results = _storages(out)
        made = {key: each for key, each in results.items() if key not in given}
        is_view = results and not made and not written
        if not self._launching and not is_view and (given or results):
            reads = {} if "empty" in str(func) else given
            self._use(str(func), reads, {**written, **made})
        return out

    def launch(self, run: Callable[..., None], launched: kernel.Kernel, *rest: Any) -> None:
        """Runs an interpreted kernel, and notes which of its parameters' storages it touched."""
        given = _storages(rest[-1])
        self._launching = True  # what the interpreter asks of torch is no operation
        try:
            with _touched() as (loads, stores):
                run(launched, *rest)
        finally:
            self._launching = False
        self._use(launched.name, _holding(given, loads), _holding(given, stores))

    def _use(
        self,
        operation: str,
        reads: dict[int, UntypedStorage],
        writes: dict[int, UntypedStorage],
    ) -> None:
        stream = self.current
        self.operations[stream.name] += 1
        stream.clock[stream.stream_id] += 1
        use = Use(operation, stream, stream.clock[stream.stream_id])
        for key, storage in {**reads, **writes}.items():
            if key not in self._memory:
                self._allocate(key, storage, use if key in writes else self._begin)
            memory = self._memory[key]
            self._ordered(use, [memory.written])
            if key in writes:
                self._ordered(use, memory.read.values())
                memory.written, memory.read = use, {}
            else:
                memory.read[stream.stream_id] = use

    @property
    def _begin(self) -> Use:
        """Of what there was before the check: behind it is every stream."""
        return Use("what came before", self.streams[0], 0)

    def _allocate(self, key: int, storage: UntypedStorage, use: Use) -> None:
        """Which may give out what is freed of the same stream's memory."""
        self._memory[key] = Memory(use, use)
        weakref.finalize(storage, lambda: self._freed.append(self._memory.pop(key)))
        again = [memory for memory in self._freed if memory.allocated.stream is use.stream]
        self._freed = [memory for memory in self._freed if memory not in again]
        for memory in again:
            self._ordered(use, [memory.written, *memory.read.values()], "freed memory of ")

    def _ordered(self, use: Use, others: Iterable[Use], what: str = "") -> None:
        for other in others:
            if not use.stream.is_behind(other):
                raise Unordered(f"{use} does not wait for {what}{other}")


@contextmanager
def checked_streams(deaf: Collection[str] = ()) -> Iterator[StreamCheck]:
    """Within it, what a GPU is given on several streams is checked, on a CPU."""
    check = StreamCheck(deaf)
    run = kernel._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", check.new_stream)
        patch.setattr(torch.accelerator, "current_stream", lambda _: check.current)
        patch.setattr(torch_device, "is_gpu", lambda _: True)
        patch.setattr(kernel, "_run", lambda *given: check.launch(run, *given))
        gpu._side_stream.cache_clear()
        with check:
            yield check
    gpu._side_stream.cache_clear()


@contextmanager
def _touched() -> Iterator[tuple[set[int], set[int]]]:
    """An address of each load and of each store of interpreted kernels."""
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    loads, stores = set[int](), set[int]()

    def noting(addresses: set[int], serve: Callable[..., Any], place: int) -> Callable[..., Any]:
        """place: of the mask, behind the pointers."""

        def access(self: Any, pointers: Any, *rest: Any, **named: Any) -> Any:
            mask = np.asarray(rest[place].data)
            first = mask.argmax()
            if mask.flat[first]:
                addresses.add(int(pointers.data.flat[first]))
            return serve(self, pointers, *rest, **named)

        return access

    with pytest.MonkeyPatch.context() as patch:
        for name, noted, place in (("load", loads, 0), ("store", stores, 1)):
            name = f"create_masked_{name}"
            patch.setattr(builder, name, noting(noted, getattr(builder, name), place))
        yield loads, stores


def _holding(storages: dict[int, UntypedStorage], addresses: set[int]) -> dict[int, UntypedStorage]:
    """Those in which one of the addresses lies."""
    return {
        key: each
        for key, each in storages.items()
        if any(each.data_ptr() <= at < each.data_ptr() + each.nbytes() for at in addresses)
    }


def _storages(tree: Any) -> dict[int, UntypedStorage]:
    """Those of all tensors, and of what descriptors describe, by their identity."""
    leaves = [getattr(leaf, "base", leaf) for leaf in tree_leaves(tree)]
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return {each._cdata: each for each in storages}


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation of torch writes."""
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
