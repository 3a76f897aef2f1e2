"""RMS norms, and the two places of a layer where a norm meets the residual.

A program has a whole row in registers, so that each value is read once.  Sums are in float32, and
values are rounded where the reference rounds them: what a norm gives, and each sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, compare, random_like
from sfumato.ops.triton.tiles import tile_for

MOST_COLUMNS = 16384
"""The longest row that a program holds in its registers."""


@triton.jit
def normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis: x [any, columns] with zeros past
    SIZE, weight float32 that broadcasts; float32."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE
    return wide * tl.rsqrt(mean + eps) * weight


@triton.jit
def weight_of(
    weight: tl.tensor, column: tl.tensor, inside: tl.tensor,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A norm's weight as float32 [1, columns]; ones where it has none."""
    if WEIGHTED:
        return tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.full((1, column.shape[0]), 1.0, tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, rows: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, ELEMENTS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """x [rows, SIZE] normed to out; a program has about ELEMENTS of them."""
    ROWS: tl.constexpr = max(1, ELEMENTS // COLUMNS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    at = row[:, None] * SIZE + column[None, :]
    kept = (row < rows)[:, None] & inside[None, :]
    value = tl.load(x + at, mask=kept, other=0.0)
    value = normed(value, weight_of(weight, column, inside, WEIGHTED), eps, SIZE)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=kept)


RMS_NORM = register(
    Kernel(
        "rms_norm",
        _rms_norm,
        {"x": "*bf16:16", "weight": "*bf16:16", "out": "*bf16:16", "rows": "i32", "eps": "fp32"},
        {"SIZE": 2816, "COLUMNS": 4096, "WEIGHTED": True},
        shapes={
            "plain": {"WEIGHTED": False},
            "heads": {"SIZE": 512, "COLUMNS": 512},  # of full layers
            "plain heads": {"SIZE": 512, "COLUMNS": 512, "WEIGHTED": False},
        },
    )
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis: x [..., size], weight [size], both
    float32, bfloat16 or float16 → like x."""
    size = x.shape[-1]
    flat = x.reshape(-1, size).contiguous()
    out = torch.empty_like(flat)
    if out.numel() == 0:
        return out.view(x.shape)
    tile = tile_for("rms_norm", x.device)
    columns = triton.next_power_of_2(size)
    launch(
        RMS_NORM,
        (triton.cdiv(len(flat), max(1, tile["ELEMENTS"] // columns)),),
        tile,
        x.device,
        x=flat,
        weight=flat if weight is None else weight.contiguous(),
        out=out,
        rows=len(flat),
        eps=eps,
        SIZE=size,
        COLUMNS=columns,
        WEIGHTED=weight is not None,
    )
    return out.view(x.shape)


@triton.jit
def _after_attention(
    x: tl.tensor, attended: tl.tensor, weight: tl.tensor, dense_weight: tl.tensor,
    expert_weight: tl.tensor, out: tl.tensor, dense_in: tl.tensor, expert_in: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """A row of: out = x + norm(attended), and the two norms of out that the dense MLP and the
    experts read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    at, kept = (row * SIZE + column)[None, :], inside[None, :]
    kind = out.dtype.element_ty
    value = tl.load(attended + at, mask=kept, other=0.0)
    value = normed(value, weight_of(weight, column, inside, True), eps, SIZE).to(kind)
    value = tl.load(x + at, mask=kept, other=0.0).to(tl.float32) + value.to(tl.float32)
    value = value.to(kind)
    tl.store(out + at, value, mask=kept)
    dense = normed(value, weight_of(dense_weight, column, inside, True), eps, SIZE)
    tl.store(dense_in + at, dense.to(kind), mask=kept)
    expert = normed(value, weight_of(expert_weight, column, inside, True), eps, SIZE)
    tl.store(expert_in + at, expert.to(kind), mask=kept)


_ROW = ("x", "attended", "out", "dense_in", "expert_in")
_WEIGHTS = ("weight", "dense_weight", "expert_weight")

AFTER_ATTENTION = register(
    Kernel(
        "after_attention",
        _after_attention,
        {**dict.fromkeys((*_ROW, *_WEIGHTS), "*bf16:16"), "eps": "fp32"},
        {"SIZE": 2816, "COLUMNS": 4096},
    )
)


def after_attention(
    x: Tensor,
    attended: Tensor,
    weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + norm(attended), and what the dense MLP and the experts read of it; see
    `ops.after_attention`."""
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dense_in, expert_in = torch.empty_like(out), torch.empty_like(out)
    rows = x.numel() // size
    if rows:
        launch(
            AFTER_ATTENTION,
            (rows,),
            tile_for("after_attention", x.device),
            x.device,
            x=x.contiguous(),
            attended=attended.contiguous(),
            weight=weight,
            dense_weight=dense_weight,
            expert_weight=expert_weight,
            out=out,
            dense_in=dense_in,
            expert_in=expert_in,
            eps=eps,
            SIZE=size,
            COLUMNS=triton.next_power_of_2(size),
        )
    return out, dense_in, expert_in


@triton.jit(do_not_specialize=["scalar_stride"])
def _after_layer(
    x: tl.tensor, dense: tl.tensor, mixed: tl.tensor, dense_weight: tl.tensor,
    mixed_weight: tl.tensor, weight: tl.tensor, scalar: tl.tensor, out: tl.tensor,
    scalar_stride: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """A row of: out = (x + norm(norm(dense) + norm(mixed))) · scalar."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    at, kept = (row * SIZE + column)[None, :], inside[None, :]
    kind = out.dtype.element_ty
    first = tl.load(dense + at, mask=kept, other=0.0)
    first = normed(first, weight_of(dense_weight, column, inside, True), eps, SIZE).to(kind)
    second = tl.load(mixed + at, mask=kept, other=0.0)
    second = normed(second, weight_of(mixed_weight, column, inside, True), eps, SIZE).to(kind)
    value = (first.to(tl.float32) + second.to(tl.float32)).to(kind)
    value = normed(value, weight_of(weight, column, inside, True), eps, SIZE).to(kind)
    value = tl.load(x + at, mask=kept, other=0.0).to(tl.float32) + value.to(tl.float32)
    by = tl.load(scalar + row * scalar_stride).to(kind).to(tl.float32)
    tl.store(out + at, (value.to(kind).to(tl.float32) * by).to(kind), mask=kept)


_LAYER = ("x", "dense", "mixed", "out", "dense_weight", "mixed_weight", "weight", "scalar")

AFTER_LAYER = register(
    Kernel(
        "after_layer",
        _after_layer,
        {**dict.fromkeys(_LAYER, "*bf16:16"), "scalar_stride": "i32", "eps": "fp32"},
        {"SIZE": 2816, "COLUMNS": 4096},
    )
)


def after_layer(
    x: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_weight: Tensor,
    mixed_weight: Tensor,
    weight: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """(x + norm(norm(dense) + norm(mixed))) · scalar; see `ops.after_layer`."""
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // size
    if rows:
        launch(
            AFTER_LAYER,
            (rows,),
            tile_for("after_layer", x.device),
            x.device,
            x=x.contiguous(),
            dense=dense.contiguous(),
            mixed=mixed.contiguous(),
            dense_weight=dense_weight,
            mixed_weight=mixed_weight,
            weight=weight,
            scalar=scalar.contiguous(),
            scalar_stride=int(scalar.numel() > 1),
            out=out,
            eps=eps,
            SIZE=size,
            COLUMNS=triton.next_power_of_2(size),
        )
    return out


def _serves_norm(x: Tensor, weight: Tensor | None, eps: float) -> bool:
    scales = () if weight is None else (weight,)
    return 0 < x.shape[-1] <= MOST_COLUMNS and elementwise(x, *scales)


def _serves_rows(x: Tensor, *others: Any) -> bool:
    tensors = [other for other in others if isinstance(other, Tensor)]
    return x.shape[-1] <= MOST_COLUMNS and elementwise(x, *tensors)


def _serves_layer(x: Tensor, *others: Any) -> bool:
    scalar = others[-2]
    return scalar.numel() in (1, x.numel() // x.shape[-1]) and _serves_rows(x, *others)


def _check_norm(device: torch.device) -> None:
    for shape in ((3, 72), (2, 5, 16)):
        x, weight = random_like(device, shape, shape[-1:])
        for scale in (weight, None):
            compare(rms_norm, reference.rms_norm.reference, (x, scale, 1e-6))


def _check_after_attention(device: torch.device) -> None:
    given = random_like(device, (2, 40), (2, 40), (40,), (40,), (40,))
    compare(after_attention, reference.after_attention.reference, (*given, 1e-6))


def _check_after_layer(device: torch.device) -> None:
    for scalars in ((1,), (2, 1)):
        given = random_like(device, *[(2, 40)] * 3, *[(40,)] * 3, scalars)
        compare(after_layer, reference.after_layer.reference, (*given, 1e-6))


TWINS = {
    twin.operation: twin
    for twin in (
        KernelTwin("rms_norm", rms_norm, _serves_norm, _check_norm),
        KernelTwin("after_attention", after_attention, _serves_rows, _check_after_attention),
        KernelTwin("after_layer", after_layer, _serves_layer, _check_after_layer),
    )
}
