"""What an engine does about faults of canvases, and about running out of memory in a step.

A batch that raises is run again item by item, so that only those rows fail of which an item raises
alone. Where memory runs out, unused memory is freed and half of the items are tried; where that
fails too, the newest row ends, or, where all items are of one row, fewer are tried. Runs nothing
itself.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from sfumato.model.devices import is_out_of_memory

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


def free_memory(device: torch.device, error: Exception) -> None:
    """Gives back what nothing uses, after an error for want of memory."""
    log.warning("out of memory; freeing what is not in use: %s", error)
    error.__traceback__ = None  # its frames hold the tensors of the failed forward
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()


class BatchRecovery(Generic[Item, Result]):
    """Runs batches, and finds the items at fault where one raises."""

    def __init__(
        self,
        run: Callable[[Sequence[Item]], list[Result]],
        free: Callable[[Exception], None],
        owner: Callable[[Item], object],
    ) -> None:
        """run: a result for each item; changes nothing where it raises. owner: whose an item is;
        items of one owner stand side by side."""
        self._run, self._free, self._owner = run, free, owner
        self._limit: int | None = None  # items that fit the memory, once more did not

    def run(self, items: Sequence[Item]) -> list[tuple[Item, Result | Exception]]:
        """Each item's result, or why there is none. Items left out had no room in memory this time
        and may try again."""
        if self._limit is not None and len(items) <= self._limit:
            self._limit = None  # the next larger batch is tried as one
        return self._in_groups(items)

    def _in_groups(self, items: Sequence[Item]) -> list[tuple[Item, Result | Exception]]:
        size = self._limit or max(1, len(items))
        groups = [items[at : at + size] for at in range(0, len(items), size)]
        return [result for group in groups for result in self._group(group)]

    def _group(self, items: Sequence[Item]) -> list[tuple[Item, Result | Exception]]:
        try:
            return self._batch(items)
        except Exception as error:
            if is_out_of_memory(error):
                return self._half(items, error)
            if len(items) == 1:
                return [(items[0], error)]
            log.exception("a batch of %d rows failed; they are run one by one", len(items))
            return [result for item in items for result in self._group([item])]

    def _half(
        self, items: Sequence[Item], error: Exception
    ) -> list[tuple[Item, Result | Exception]]:
        self._free(error)
        half = items[: max(1, len(items) // 2)]
        try:
            results = self._batch(half)
        except Exception as second_error:
            if not is_out_of_memory(second_error):
                return self._group(half)
            if len(half) > 1 and self._owner(items[0]) is self._owner(items[-1]):
                return self._half(half, second_error)
            self._free(second_error)
            return [(items[-1], second_error)]
        if len(half) < len(items):
            self._limit = len(half)
            results += self._in_groups(items[len(half) :])
        return results

    def _batch(self, items: Sequence[Item]) -> list[tuple[Item, Result | Exception]]:
        return list(zip(items, self._run(items), strict=True))
