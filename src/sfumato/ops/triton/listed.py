"""The scores of given tokens: each position by rows of the embedding of its own.

Reads only those rows, which is all that a decision asks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, assert_close, random_like
from sfumato.ops.triton.tiles import tile_for


@triton.jit
def weight_rows(
    weight: tl.tensor, row: tl.tensor, column: tl.tensor, listed: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The unpacking of gathered rows of a weight [any, COLUMNS]; zeros where not `listed` and past
    the last column."""
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    seen = listed[:, None] & (column < COLUMNS)[None, :]
    return tl.load(weight + at, mask=seen, other=0.0)


@triton.jit(do_not_specialize=["ids", "out", "count"])
def _listed_scores(
    hidden: tl.tensor, weight: tl.tensor, ids: tl.tensor, out: tl.tensor, count: tl.tensor,
    HIDDEN: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
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
        rows = weight_rows(weight, row, column, listed, HIDDEN)
        states = tl.load(hidden + position * HIDDEN + column, mask=within, other=0.0)
        sums += rows.to(tl.float32) * states.to(tl.float32)[None, :]
    score = tl.sum(sums, axis=1)
    tl.store(out + position * count + place, score.to(out.dtype.element_ty), mask=listed)


LISTED_SCORES = register(
    Kernel(
        "listed_scores",
        _listed_scores,
        {"hidden": "*fp32:16", "weight": "*bf16:16", "ids": "*i64", "out": "*fp32", "count": "i32"},
        {"HIDDEN": 2816},
    )
)


def own_scores(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products of each position with the rows that its ids name, summed in float32; see
    `ops.own_scores`."""
    positions, count = ids.shape
    out = hidden.new_empty(positions, count)
    if out.numel():
        tile = tile_for("listed_scores", hidden.device)
        launch(
            LISTED_SCORES,
            (positions, triton.cdiv(count, tile["IDS"])),
            tile,
            hidden.device,
            hidden=hidden.contiguous(),
            weight=weight,
            ids=ids.contiguous(),
            out=out,
            count=count,
            HIDDEN=hidden.shape[1],
        )
    return out


def _serves(hidden: Tensor, weight: Tensor, ids: Tensor) -> bool:
    return weight.is_contiguous() and elementwise(hidden, weight)


def _check(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, weight = random_like(device, dtype, (2, 136), (50, 136))
    ids = torch.arange(38, device=device).view(2, 19)
    expected = reference.own_scores(hidden.float(), weight, ids)
    assert_close(own_scores(hidden.float(), weight, ids), expected, 1e-5)


TWINS = {"own_scores": KernelTwin("own_scores", own_scores, _serves, _check)}
