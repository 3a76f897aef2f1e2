"""Traces tensor code on a CUDA device that is not there, to show what it asks of the host.

On CPU tensors `.cpu()`, `.tolist()` and `.item()` dispatch nothing; on a fake device each fails
here: FakeTensorMode refuses numbers and shapes that depend on data, `Trace` copies between devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda")


class Trace(TorchDispatchMode):
    """Counts tensor operations; raises AssertionError for one that touches another device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        out = func(*args, **(kwargs or {}))
        touched = torch.utils._pytree.tree_leaves((args, kwargs, out))
        devices = {x.device.type for x in touched if isinstance(x, Tensor)}
        assert devices <= {DEVICE.type}, f"{func}: on {sorted(devices)}"
        return out


class Indexing(TorchFunctionMode):
    """Indexes by operations: Python's way asks for CUDA itself, which a CPU build has not."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            view, picks = _view(*args)
            return torch.ops.aten.index(view, picks) if picks else view
        if func is Tensor.__setitem__:
            (view, picks), value = _view(*args[:2]), args[2]
            if not picks:
                return view.copy_(value) if isinstance(value, Tensor) else view.fill_(value)
            if not isinstance(value, Tensor):
                value = view.new_full((), value)
            return torch.ops.aten.index_put_(view, picks, value.to(view.dtype))
        return func(*args, **(kwargs or {}))


def _view(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The part of x that all but the tensors of an index choose, and those, by axis."""
    index = index if isinstance(index, tuple) else (index,)
    named = sum(1 for each in index if each is not None and each is not Ellipsis)
    picks: list[Tensor | None] = []
    axis = 0
    for each in index:
        if each is None:
            x = x.unsqueeze(axis)
        elif each is Ellipsis:
            axis += x.dim() - axis - (named - sum(1 for pick in picks if pick is not None))
            continue
        elif isinstance(each, slice):
            named -= 1
            if each != slice(None):
                x = torch.ops.aten.slice(x, axis, each.start, each.stop, each.step or 1)
        elif isinstance(each, Tensor):
            picks += [None] * (axis - len(picks)) + [each]
        else:
            named -= 1
            x = x.select(axis, each)
            continue
        axis += 1
    return x, picks


@contextmanager
def traced() -> Iterator[Trace]:
    """What is made inside on DEVICE is fake; everything inside must be on DEVICE."""
    with FakeTensorMode(), Trace() as trace, Indexing():
        yield trace
