"""Canvases behind questions: what each position sees, against one row after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfumato import ops

SLOTS, HEADS, KV_HEADS, DIM, LENGTH, LONGEST = 4, 4, 2, 8, 12, 10
ROWS = (2, 0, 2, 3)  # slots
STARTS, COUNTS = (5, 30, 20, 0), (10, 3, 1, 0)


def read_call(size: int, firsts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors whose unwritten elements are NaN."""
    torch.manual_seed(size)
    new = (torch.randn(4, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stored = [torch.randn(SLOTS, KV_HEADS, size, DIM) for _ in range(2)]
    beside = [torch.full((KV_HEADS, 33, DIM), float("nan")) for _ in range(2)]
    for slot, first in zip(ROWS, firsts, strict=True):
        for each in stored:
            each[slot, :, min(first, size) :] = float("nan")
    for start, count in zip(STARTS, COUNTS, strict=True):
        for each in beside:
            each[:, start : start + count] = torch.randn(KV_HEADS, count, DIM)
    return (*new, *stored, *beside)


def arguments(
    tensors: tuple[Tensor, ...], firsts: tuple[int, ...], window: int | None
) -> tuple[Tensor, Tensor, Tensor, ops.Rows]:
    q, k, v, keys, values, own_keys, own_values = tensors
    slots, first, starts, counts = (torch.tensor(x) for x in (ROWS, firsts, STARTS, COUNTS))
    questions = ops.Questions(own_keys, own_values, starts, counts, LONGEST)
    return q, k, v, ops.Rows(keys, values, slots, first, window, questions=questions)


def alone(tensors: tuple[Tensor, ...], row: int, first: int, window: int | None) -> Tensor:
    """Of one row, by the keys that it sees."""
    q, k, v, *held = tensors
    size, start, count = held[0].shape[2], STARTS[row], COUNTS[row]
    lowest = 0 if window is None else max(0, first + count - window + 1)
    old = torch.tensor([p % size for p in range(max(lowest, first - size), first)]).long()
    own = torch.arange(start + max(0, lowest - first), start + count)
    keys, values = (
        [stored[ROWS[row]][:, old], beside[:, own], new[row].transpose(0, 1)]
        for stored, beside, new in ((held[0], held[2], k), (held[1], held[3], v))
    )
    return ops.attend(q[row], keys, values)


@pytest.mark.parametrize("window", [None, 7, 16])
@pytest.mark.parametrize("firsts", [(3, 0, 3, 5), (30, 6, 30, 0), (15, 40, 15, 2)])
def test_each_row_sees_what_it_sees_alone(window: int | None, firsts: tuple[int, ...]) -> None:
    tensors = read_call(64 if window is None else window - 1, firsts)
    out = ops.attend_padded(*arguments(tensors, firsts, window))
    assert out.isfinite().all()
    for row, first in enumerate(firsts):
        torch.testing.assert_close(out[row], alone(tensors, row, first, window))
