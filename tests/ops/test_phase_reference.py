"""Rows of both phases: what each sees and what it stores, against one row after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfumato import ops

SLOTS, HEADS, KV_HEADS, DIM, LENGTH = 4, 4, 2, 8, 12


def drawn(size: int) -> tuple[Tensor, ...]:
    torch.manual_seed(size)
    new = (torch.randn(3, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return (*new, *(torch.randn(SLOTS, KV_HEADS, size, DIM) for _ in range(2)))


def positions_in(size: int, first: int) -> list[int]:
    """Which position stands at each place of a slot that holds `first`; -1: none."""
    held = [-1] * size
    for position in range(first):
        held[position % size] = position
    return held


@pytest.mark.parametrize("window", [None, 7, 16])
@pytest.mark.parametrize("firsts", [(0, 3, 5), (30, 6, 0), (15, 40, 2)])
def test_each_row_sees_what_it_sees_alone(window: int | None, firsts: tuple[int, ...]) -> None:
    size = 64 if window is None else window - 1
    q, k, v, keys, values = drawn(size)
    widths, commits = (12, 9, 5), (12, 0, 5)
    for slot, first in zip((2, 0, 3), firsts, strict=True):  # what no one wrote
        for place, position in enumerate(positions_in(size, first)):
            if position < 0:
                keys[slot, :, place] = values[slot, :, place] = float("nan")
    slots, first, width, commit = (torch.tensor(x) for x in ([2, 0, 3], firsts, widths, commits))
    out = ops.attend_padded(q, k, v, ops.Rows(keys, values, slots, first, window, width, commit))
    assert out.isfinite().all()
    for row, slot in enumerate((2, 0, 3)):
        first, width = firsts[row], widths[row]
        held = torch.tensor(positions_in(size, first))
        old_keys, old_values = keys[slot][:, held >= 0], values[slot][:, held >= 0]
        causal = None
        if commits[row]:
            own = torch.arange(first, first + width)
            causal = ops.Causal.of(own, torch.cat((held[held >= 0], own)), window)
        parts = [[old, new[row, :width].transpose(0, 1)]
                 for old, new in ((old_keys, k), (old_values, v))]  # fmt: skip
        alone = ops.attend(q[row, :width], *parts, causal)
        torch.testing.assert_close(out[row, :width], alone)


@pytest.mark.parametrize("size", [5, 12, 40])
def test_only_rows_that_commit_write(size: int) -> None:
    _, new, _, stored, _ = drawn(size)
    before, firsts, counts = stored.clone(), (size - 3, 17 % size, 2), (12, 0, 4)
    counts = tuple(min(n, size) if size == 40 else n for n in counts)
    ops.write_cache(stored, new, *(torch.tensor(x) for x in ([1, 3, 0], firsts, counts)))
    for slot, first, count, row in zip((1, 3, 0), firsts, counts, new, strict=True):
        for token in range(count):
            before[slot, :, (first + token) % size] = row[token]
    assert torch.equal(stored, before)
