"""What a layer does between its products: RMS norms, alone, where they meet the residual and, with
the rotary embedding, of heads; and the write of keys and values into the cache.

A program has a whole row in registers, so that each value is read once, or the heads of one token
of queries, keys or values.  Sums are in float32, and values are rounded where the reference rounds
them: what a norm gives, and each sum.  Norms and rotation of heads are in float32 until they are
stored, where the reference rounds after the norm and after each product of the rotation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import attention_reference, reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, Trial, compare
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
        exact=("weight",),
    )
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis: x [..., size], weight [size], both
    float32, bfloat16 or float16 → like x."""
    size = x.shape[-1]
    flat = x.reshape(-1, size).contiguous()
    out = torch.empty_like(flat)
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
        exact=_WEIGHTS,
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
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dense_in, expert_in = torch.empty_like(out), torch.empty_like(out)
    _launch_rows(
        AFTER_ATTENTION,
        out,
        x=x.contiguous(),
        attended=attended.contiguous(),
        weight=weight,
        dense_weight=dense_weight,
        expert_weight=expert_weight,
        dense_in=dense_in,
        expert_in=expert_in,
        eps=eps,
    )
    return out, dense_in, expert_in


def _launch_rows(kernel: Kernel, out: Tensor, **given: Any) -> None:
    """A program for each row of `out`."""
    size, tile = out.shape[-1], tile_for(kernel.name, out.device)
    given |= {"out": out, "SIZE": size, "COLUMNS": triton.next_power_of_2(size)}
    launch(kernel, (out.numel() // size,), tile, out.device, **given)


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
        exact=_LAYER[4:],
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
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_rows(
        AFTER_LAYER,
        out,
        x=x.contiguous(),
        dense=dense.contiguous(),
        mixed=mixed.contiguous(),
        dense_weight=dense_weight,
        mixed_weight=mixed_weight,
        weight=weight,
        scalar=scalar.contiguous(),
        scalar_stride=int(scalar.numel() > 1),
        eps=eps,
    )
    return out


def _serves_rows(x: Tensor, *others: Any) -> bool:
    tensors = [other for other in others if isinstance(other, Tensor)]
    return x.shape[-1] <= MOST_COLUMNS and elementwise(x, *tensors)


def _serves_layer(x: Tensor, *others: Any) -> bool:
    scalar = others[-2]
    return scalar.numel() in (1, x.numel() // x.shape[-1]) and _serves_rows(x, *others)


def _check_norm(trial: Trial) -> None:
    for shape in ((3, trial.sizes.hidden), (2, 5, 16)):
        x, weight = trial.random(shape, shape[-1:])
        for scale in (weight, weight.float(), None):
            compare(rms_norm, reference.rms_norm.reference, (x, scale, 1e-6))


def _check_after_attention(trial: Trial) -> None:
    row = (trial.sizes.hidden,)
    given = trial.random((2, *row), (2, *row), row, row, row)
    compare(after_attention, reference.after_attention.reference, (*given, 1e-6))


def _check_after_layer(trial: Trial) -> None:
    row = (trial.sizes.hidden,)
    for scalars in ((1,), (2, 1)):
        given = trial.random(*[(2, *row)] * 3, *[row] * 3, scalars)
        compare(after_layer, reference.after_layer.reference, (*given, 1e-6))


@triton.jit
def _load_halves(
    source: tl.tensor, at: tl.tensor, inside: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The two halves of heads, float32 [heads, HALF_PADDED] each."""
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _unit_halves(
    first: tl.tensor, second: tl.tensor, eps: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Both halves over the root of the mean square of a head."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    return first * scale, second * scale


@triton.jit
def _store_halves(
    out: tl.tensor, at: tl.tensor, inside: tl.tensor, first: tl.tensor, second: tl.tensor,
    HALF: tl.constexpr,
) -> None:  # fmt: skip
    kind = out.dtype.element_ty
    tl.store(out + at, first.to(kind), mask=inside)
    tl.store(out + at + HALF, second.to(kind), mask=inside)


@triton.jit
def _turned(
    source: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, at: tl.tensor,
    inside: tl.tensor, column: tl.tensor, eps: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The halves of heads, normed and rotated; cos and sin: those of the token."""
    real = column < HALF
    turn = tl.load(cos + column, mask=real, other=0.0).to(tl.float32)[None, :]
    lift = tl.load(sin + column, mask=real, other=0.0).to(tl.float32)[None, :]
    first, second = _load_halves(source, at, inside, HALF)
    first, second = _unit_halves(first, second, eps, HALF)
    scale, scale_2 = _load_halves(weight, column[None, :], real[None, :], HALF)
    first, second = first * scale, second * scale_2
    return first * turn - second * lift, second * turn + first * lift


@triton.jit
def _prepare_heads(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, v_out: tl.tensor,
    q_stride: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """AT_ONCE heads of a token: norms and rotation of a query, a key, and the norm of a value.

    Grid: (tokens, ⌈HEADS / AT_ONCE⌉ + ⌈KV_HEADS / AT_ONCE⌉): queries first, then keys with values.
    q [tokens, HEADS, 2 · HALF], k and v [tokens, KV_HEADS, 2 · HALF], tokens q_stride, k_stride
    and v_stride elements apart; cos and sin [tokens, HALF].
    """
    QUERIES: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    cos += token * HALF
    sin += token * HALF
    if group < QUERIES:
        head = group * AT_ONCE + tl.arange(0, AT_ONCE)
        inside = (head < HEADS)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        first, second = _turned(
            q + token * q_stride, q_weight, cos, sin, at, inside, column, eps, HALF
        )
        _store_halves(q_out + token * (HEADS * 2 * HALF), at, inside, first, second, HALF)
    else:
        head = (group - QUERIES) * AT_ONCE + tl.arange(0, AT_ONCE)
        inside = (head < KV_HEADS)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        first, second = _turned(
            k + token * k_stride, k_weight, cos, sin, at, inside, column, eps, HALF
        )
        value, value_2 = _load_halves(v + token * v_stride, at, inside, HALF)
        value, value_2 = _unit_halves(value, value_2, eps, HALF)
        _store_halves(k_out + token * (KV_HEADS * 2 * HALF), at, inside, first, second, HALF)
        _store_halves(v_out + token * (KV_HEADS * 2 * HALF), at, inside, value, value_2, HALF)


_TENSORS = ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "q_out", "k_out", "v_out")

PREPARE_HEADS = register(
    Kernel(
        "prepare_heads",
        _prepare_heads,
        {
            **dict.fromkeys(_TENSORS, "*bf16:16"),
            **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16"),
            "eps": "fp32",
        },
        {"HEADS": 16, "KV_HEADS": 8, "HALF": 128, "COLUMNS": 128},
        shapes={"full": {"KV_HEADS": 2, "HALF": 256, "COLUMNS": 256}},
        exact=("q_weight", "k_weight"),
    )
)


def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norms_values: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of the projections of tokens; see `ops.prepare_heads`.

    q [tokens, heads, d], k and v [tokens, kv_heads, d], which may be parts of one tensor; cos and
    sin [tokens, d / 2].
    """
    tokens, heads, d = q.shape
    kv_heads = k.shape[1]
    v = k if v is None else v
    q, k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (q, k, v))
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    tile = tile_for("prepare_heads", q.device)
    launch(
        PREPARE_HEADS,
        (tokens, sum(triton.cdiv(count, tile["AT_ONCE"]) for count in (heads, kv_heads))),
        tile,
        q.device,
        q=q,
        k=k,
        v=v,
        q_weight=q_weight,
        k_weight=k_weight,
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        eps=eps,
        **dict(zip(("q_out", "k_out", "v_out"), outs, strict=True)),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=d // 2,
        COLUMNS=triton.next_power_of_2(d // 2),
    )
    return outs[0], outs[1], outs[2]


def _serves_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norms_values: bool,
) -> bool:
    values = () if v is None else (v,)
    served = norms_values and q.dim() == 3
    return served and elementwise(q, k, *values, q_weight, k_weight, cos, sin)


def _check_heads(trial: Trial) -> None:
    for heads, kv_heads, d, _ in trial.sizes.attention:
        q, *others = (3, heads, d), (3, kv_heads, d), (3, kv_heads, d), (d,), (d,)
        given = trial.random(q, *others, (3, d // 2), (3, d // 2))
        compare(prepare_heads, reference.prepare_heads.reference, (*given, 1e-6))


@triton.jit(do_not_specialize=["slots", "first", "count", "length", "size"])
def _write_cache(
    stored: tl.tensor, new: tl.tensor, slots: tl.tensor, first: tl.tensor, count: tl.tensor,
    length: tl.tensor, size: tl.tensor,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ELEMENTS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The heads of one token.  Grid: (rows, length).

    stored [slots, KV_HEADS, size, HEAD]; new [rows, length, KV_HEADS, HEAD].
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    most = tl.load(count + row)
    # Of more tokens than a ring holds, the last ones stay.
    written = (token < most) & (token >= most - size)
    place = (tl.load(first + row) + token) % size
    element = tl.arange(0, ELEMENTS)
    inside = (element < KV_HEADS * HEAD) & written
    source = (row * length + token) * (KV_HEADS * HEAD) + element
    value = tl.load(new + source, mask=inside, other=0.0)
    head, column = element // HEAD, element % HEAD
    target = (tl.load(slots + row) * KV_HEADS + head) * size + place
    tl.store(stored + target * HEAD + column, value.to(stored.dtype.element_ty), mask=inside)


WRITE_CACHE = register(
    Kernel(
        "write_cache",
        _write_cache,
        {
            "stored": "*bf16:16",
            "new": "*bf16:16",
            "length": "i32",
            "size": "i32",
            **dict.fromkeys(("slots", "first", "count"), "*i64"),
        },
        {"KV_HEADS": 8, "HEAD": 256, "ELEMENTS": 2048},
        shapes={"full": {"KV_HEADS": 2, "HEAD": 512, "ELEMENTS": 1024}},
    )
)


def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the tokens that rows commit; see `ops.write_cache`."""
    rows, length, kv_heads, d = new.shape
    launch(
        WRITE_CACHE,
        (rows, length),
        tile_for("write_cache", new.device),
        new.device,
        stored=stored,
        new=new.contiguous(),
        slots=slots.contiguous(),
        first=first.contiguous(),
        count=count.contiguous(),
        length=length,
        size=stored.shape[2],
        KV_HEADS=kv_heads,
        HEAD=d,
        ELEMENTS=triton.next_power_of_2(kv_heads * d),
    )


def _serves_write(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> bool:
    return stored.is_contiguous() and new.numel() > 0 and elementwise(stored, new)


def _check_write(trial: Trial) -> None:
    """Rows that write nothing, a part, and more than a ring holds."""
    numbers = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]]).to(trial.device)
    for _, heads, d, _ in trial.sizes.attention:
        stored, new = trial.random((4, heads, 3, d), (3, 4, heads, d))
        expected = stored.clone()
        write_cache(stored, new, *numbers)
        attention_reference.write_cache.reference(expected, new, *numbers)
        assert torch.equal(stored, expected), "the cache differs"


TWINS = {
    "rms_norm": KernelTwin("rms_norm", rms_norm, _serves_rows, _check_norm),
    "after_attention": KernelTwin(
        "after_attention", after_attention, _serves_rows, _check_after_attention
    ),
    "after_layer": KernelTwin("after_layer", after_layer, _serves_layer, _check_after_layer),
    "prepare_heads": KernelTwin("prepare_heads", prepare_heads, _serves_heads, _check_heads),
    "write_cache": KernelTwin("write_cache", write_cache, _serves_write, _check_write),
}
