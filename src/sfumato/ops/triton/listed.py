"""The scores of given tokens: each position by rows of the embedding of its own.

Reads only those rows, which is all that a decision asks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.planes import PlaneTensor, takes
from sfumato.ops.triton.self_test import (
    assert_close,
    random_like,
    random_weight,
    twins_of,
    whole_blocks,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import BF16, of_forms, operand, plane_rows
from sfumato.weights.formats import ScaledTensor


@triton.jit
def weight_rows(
    weight: tl.tensor, row: tl.tensor, first: tl.tensor, listed: tl.tensor, rows: tl.tensor,
    COLUMNS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """DEPTH columns from `first` on of gathered rows of a weight [rows, COLUMNS], float32 [IDS,
    DEPTH]; zeros where not `listed` and past the last column."""
    at = row.to(tl.int64)
    if FORMAT == BF16:
        column = first + tl.arange(0, DEPTH)
        seen = listed[:, None] & (column < COLUMNS)[None, :]
        numbers = tl.load(weight + at[:, None] * COLUMNS + column[None, :], mask=seen, other=0.0)
        return numbers.to(tl.float32)
    else:
        return plane_rows(weight, at, listed, first, rows, COLUMNS, IDS, DEPTH, FORMAT)


@triton.jit(do_not_specialize=["ids", "out", "count", "vocab"])
def _listed_scores(
    hidden: tl.tensor, weight: tl.tensor, ids: tl.tensor, out: tl.tensor, count: tl.tensor,
    vocab: tl.tensor, HIDDEN: tl.constexpr, FORMAT: tl.constexpr, IDS: tl.constexpr,
    DEPTH: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """Products of a position with IDS of its tokens.  Grid: (positions, ⌈count / IDS⌉)."""
    position = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * IDS + tl.arange(0, IDS)
    listed = place < count
    row = tl.load(ids + position * count + place, mask=listed, other=0)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((IDS, DEPTH), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        column = start + depth
        within = column < HIDDEN
        rows = weight_rows(weight, row, start, listed, vocab, HIDDEN, IDS, DEPTH, FORMAT)
        states = tl.load(hidden + position * HIDDEN + column, mask=within, other=0.0)
        sums += rows * states.to(tl.float32)[None, :]
    score = tl.sum(sums, axis=1)
    tl.store(out + position * count + place, score.to(out.dtype.element_ty), mask=listed)


LISTED_SCORES = of_forms(
    Kernel(
        "listed_scores",
        _listed_scores,
        {
            "hidden": "*fp32:16",
            "weight": "*bf16:16",
            "ids": "*i64",
            "out": "*fp32",
            "count": "i32",
            "vocab": "i32",
        },
        {"HIDDEN": 2816, "FORMAT": 0},
    ),
    *("HIDDEN", "Q6_K"),
)


def own_scores(hidden: Tensor, weight: Tensor | PlaneTensor, ids: Tensor) -> Tensor:
    """Products of each position with the rows that its ids name, summed in float32; see
    `ops.own_scores`. Rows in planes are unpacked in registers, and not rounded."""
    positions, count = ids.shape
    out = hidden.new_empty(positions, count)
    if out.numel():
        held = operand(weight)
        kernel = LISTED_SCORES[held.form]
        tile = tile_for(kernel.name, hidden.device)
        launch(
            kernel,
            (positions, triton.cdiv(count, tile["IDS"])),
            tile,
            hidden.device,
            hidden=hidden.contiguous(),
            weight=held.numbers,
            ids=ids.contiguous(),
            out=out,
            count=count,
            vocab=weight.shape[0],
            HIDDEN=hidden.shape[1],
            FORMAT=held.number,
        )
    return out


def _serves(hidden: Tensor, weight: Tensor | PlaneTensor, ids: Tensor) -> bool:
    floats = [weight] if isinstance(weight, Tensor) else []
    return takes(weight) and elementwise(hidden, *floats)


def _check(format: str, device: torch.device) -> None:
    (hidden,) = random_like(device, (2, whole_blocks(format, 136)))
    weight = random_weight(device, format, 50, hidden.shape[1])
    assert not isinstance(weight, ScaledTensor)
    ids = torch.arange(38, device=device).view(2, 19)
    floats = weight.to(torch.float32)
    expected = reference.own_scores.reference(hidden.float(), floats, ids)
    assert_close(own_scores(hidden.float(), weight, ids), expected, 1e-5)


TWINS = twins_of("own_scores", own_scores, _serves, _check)
