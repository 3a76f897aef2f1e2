"""The scores of given tokens: each position by rows of the embedding of its own.

Reads only those rows, which is all that a decision asks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise, takes_planes
from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, plane_names
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    random_like,
    random_planes,
    whole_blocks,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import BF16, plane_rows


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


LISTED_SCORES = register(
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
    )
)
LISTED_PLANES = register(
    replace(
        LISTED_SCORES,
        name="listed_scores_planes",
        types={**LISTED_SCORES.types, "weight": "*u8:16"},
        sizes={**LISTED_SCORES.sizes, "FORMAT": LAYOUTS["Q6_K"].number},
        columns="HIDDEN",
    )
)


def own_scores(hidden: Tensor, weight: Tensor | PlaneTensor, ids: Tensor) -> Tensor:
    """Products of each position with the rows that its ids name, summed in float32; see
    `ops.own_scores`. Rows in planes are unpacked in registers, and not rounded."""
    positions, count = ids.shape
    out = hidden.new_empty(positions, count)
    if out.numel():
        kernel, numbers, number = LISTED_SCORES, weight, 0
        if isinstance(weight, PlaneTensor):
            kernel, numbers, number = LISTED_PLANES, weight.data, weight.layout.number
        tile = tile_for(kernel.name, hidden.device)
        launch(
            kernel,
            (positions, triton.cdiv(count, tile["IDS"])),
            tile,
            hidden.device,
            hidden=hidden.contiguous(),
            weight=numbers,
            ids=ids.contiguous(),
            out=out,
            count=count,
            vocab=weight.shape[0],
            HIDDEN=hidden.shape[1],
            FORMAT=number,
        )
    return out


def _serves(hidden: Tensor, weight: Tensor, ids: Tensor) -> bool:
    return weight.is_contiguous() and elementwise(hidden, weight)


def _check(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, weight = random_like(device, dtype, (2, 136), (50, 136))
    ids = torch.arange(38, device=device).view(2, 19)
    expected = reference.own_scores.reference(hidden.float(), weight, ids)
    assert_close(own_scores(hidden.float(), weight, ids), expected, 1e-5)


def _serves_planes(hidden: Tensor, weight: PlaneTensor, ids: Tensor) -> bool:
    return takes_planes(weight) and elementwise(hidden)


def _check_planes(format: str, device: torch.device) -> None:
    (hidden,) = random_like(device, torch.float32, (2, whole_blocks(format, 136)))
    weight = random_planes(device, format, 50, hidden.shape[1])
    ids = torch.arange(38, device=device).view(2, 19)
    expected = reference.own_scores.reference(hidden, weight.dequantize(), ids)
    assert_close(own_scores(hidden, weight, ids), expected, 1e-5)


TWINS = {
    "own_scores": KernelTwin("own_scores", own_scores, _serves, _check),
    **{
        name: KernelTwin(name, own_scores, _serves_planes, partial(_check_planes, format))
        for format, name in plane_names("own_scores").items()
    },
}
