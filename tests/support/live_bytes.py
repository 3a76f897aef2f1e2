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
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._now = self.most = 0

    def now(self) -> int:
        return self._now

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Counted once and taken off at its end: to add up all after each operation takes longer
        # than the operations.
        alive = weakref.ref(storage, self._forget)
        if alive not in self._sizes:
            self._sizes[alive] = storage.nbytes()
            self._now += self._sizes[alive]

    def _forget(self, storage: weakref.ref[Any]) -> None:
        self._now -= self._sizes.pop(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.untyped_storage()._cdata not in self._given:
                self._count(leaf.untyped_storage())
        self.most = max(self.most, self._now)
        return out
