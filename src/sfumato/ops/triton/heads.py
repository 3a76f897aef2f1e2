"""Queries, keys and values: norms of each head and the rotary embedding.

A program has the heads of one token of one of the three.  Everything is in float32 until it is
stored, where the reference rounds after the norm and after each product of the rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, assert_close, error_bound, random_like
from sfumato.ops.triton.tiles import tile_for


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
    if tokens:
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


def _serves(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> bool:
    values = () if v is None else (v,)
    return q.dim() == 3 and elementwise(q, k, *values, q_weight, k_weight, cos, sin)


def _check(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = random_like(device, dtype, (3, 5, 24), (3, 2, 24), (3, 2, 24))
    given = random_like(device, dtype, (24,), (24,), (3, 12), (3, 12))
    weights = given[0], given[1], given[2], given[3]
    expected = reference.prepare_heads.reference(q, k, v, *weights, 1e-6)
    for out, right in zip(prepare_heads(q, k, v, *weights, 1e-6), expected, strict=True):
        assert_close(out, right, error_bound(dtype))


TWINS = {"prepare_heads": KernelTwin("prepare_heads", prepare_heads, _serves, _check)}
