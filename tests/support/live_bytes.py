"""The memory of tensors that operations make, counted while a test runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors that operations have made, while they live; not of views of those
    that are given."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.untyped_storage()._cdata not in self._given:
                self._storages.add(leaf.untyped_storage())
        self.most = max(self.most, self.now())
        return out
