"""Queries, keys and values: norms of each head, the rotary embedding, and the write into the cache.

A program has the heads of one token of one of the three.  Norms and rotation are in float32 until
they are stored, where the reference rounds after the norm and after each product of the rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import attention_reference, reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, compare, random_like
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
    given = random_like(
        *(device, (3, 5, 24), (3, 2, 24), (3, 2, 24), (24,), (24,), (3, 12), (3, 12)),
    )
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


def _check_write(device: torch.device) -> None:
    """Rows that write nothing, a part, and more than a ring holds."""
    stored, new = random_like(device, (4, 2, 3, 64), (3, 4, 2, 64))
    numbers = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]]).to(device)
    expected = stored.clone()
    write_cache(stored, new, *numbers)
    attention_reference.write_cache.reference(expected, new, *numbers)
    assert torch.equal(stored, expected), "the cache differs"


TWINS = {
    "prepare_heads": KernelTwin("prepare_heads", prepare_heads, _serves, _check),
    "write_cache": KernelTwin("write_cache", write_cache, _serves_write, _check_write),
}
