"""Queries, keys and values: norms of each head, the rotary embedding, and the cache's write.

A program has the heads of one token of one of the three.  Everything is in float32 until it is
stored, where the reference rounds after the norm and after each product of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.tiles import tile_for


@dataclass(frozen=True)
class CacheWrite:
    """Where the keys and values of tokens go: token i of a row, at position `lengths` + i, to
    (lengths + i) mod size of its slot, if it is one of the last `size` of its row's `counts`."""

    keys: Tensor  # [slots, kv_heads, size, d]
    values: Tensor  # like keys
    slots: Tensor  # int64 [rows]
    lengths: Tensor  # int64 [rows]: positions that the slot holds
    counts: Tensor  # int64 [rows]: tokens of the row that are written, the first ones; 0: none


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
def _cache_place(
    token: tl.tensor, slots: tl.tensor, lengths: tl.tensor, counts: tl.tensor, width: tl.tensor,
    size: tl.tensor, elements: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Whether a token is written, where its slot begins and at which of the slot's places."""
    row, index = token // width, token % width
    count = tl.load(counts + row)
    written = (index < count) & (index >= count - size)
    place = (tl.load(lengths + row) + index) % size
    return written, tl.load(slots + row) * size * elements, place


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
def _write_cache(
    cache: tl.tensor, at_slot: tl.tensor, place: tl.tensor, head: tl.tensor, column: tl.tensor,
    size: tl.tensor, stored: tl.tensor, first: tl.tensor, second: tl.tensor,
    HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Stores heads at a place of a slot [kv_heads, size, 2 · HALF]."""
    where = (head.to(tl.int64)[:, None] * size + place) * (2 * HALF) + column[None, :]
    _store_halves(cache + at_slot, where, stored, first, second, HALF)


@triton.jit
def _prepare_heads(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, v_out: tl.tensor,
    keys: tl.tensor, values: tl.tensor, slots: tl.tensor, lengths: tl.tensor, counts: tl.tensor,
    q_stride: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor, width: tl.tensor,
    size: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    WRITES: tl.constexpr, AT_ONCE: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """AT_ONCE heads of a token: norms and rotation of a query, a key, and the norm of a value.

    Grid: (tokens, ⌈HEADS / AT_ONCE⌉ + ⌈KV_HEADS / AT_ONCE⌉): queries first, then keys with values.
    q [tokens, HEADS, 2 · HALF], k and v [tokens, KV_HEADS, 2 · HALF], tokens q_stride, k_stride
    and v_stride elements apart; cos and sin [tokens, HALF]; keys and values as in `CacheWrite`,
    whose rows have `width` tokens.
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
        if WRITES:
            written, at_slot, place = _cache_place(
                token, slots, lengths, counts, width, size, KV_HEADS * 2 * HALF
            )
            stored = inside & written
            _write_cache(keys, at_slot, place, head, column, size, stored, first, second, HALF)
            _write_cache(values, at_slot, place, head, column, size, stored, value, value_2, HALF)


_TENSORS = ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "q_out", "k_out", "v_out")

PREPARE_HEADS = register(
    Kernel(
        "prepare_heads",
        _prepare_heads,
        {
            **dict.fromkeys((*_TENSORS, "keys", "values"), "*bf16:16"),
            **dict.fromkeys(("slots", "lengths", "counts"), "*i64"),
            **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16"),
            **{"width": "i32", "size": "i32", "eps": "fp32"},
        },
        {"HEADS": 16, "KV_HEADS": 8, "HALF": 128, "COLUMNS": 128, "WRITES": True},
    )
)


def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    eps: float,
    write: CacheWrite | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of the projections of packed tokens.

    q [tokens, heads, d], k and v [tokens, kv_heads, d] (v None: k stands for it), which may be
    parts of one tensor; the norms' weights [d]; rotary: cos and sin [tokens, d / 2] → q, k and v of
    the same shapes: `rotate(norm(q))`, `rotate(norm(k))` and v's norm without a weight.  write: the
    cache that the keys and values are put into as well; the tokens are those of its rows, all of
    one width, one row after another.
    """
    tokens, heads, d = q.shape
    kv_heads = k.shape[1]
    v = k if v is None else v
    q, k, v = (each if each.stride()[1:] == (d, 1) else each.contiguous() for each in (q, k, v))
    outs = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    if tokens == 0:
        return outs
    tile = tile_for("prepare_heads", q.device)
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)
    launch(
        PREPARE_HEADS,
        (tokens, sum(triton.cdiv(count, tile["AT_ONCE"]) for count in (heads, kv_heads))),
        tile,
        q.device,
        **{"q": q, "k": k, "v": v, "q_weight": q_weight, "k_weight": k_weight},
        **{"cos": rotary[0].contiguous(), "sin": rotary[1].contiguous()},
        **{"q_out": outs[0], "k_out": outs[1], "v_out": outs[2]},
        **{"keys": outs[1] if write is None else write.keys},
        **{"values": outs[2] if write is None else write.values},
        slots=nothing if write is None else write.slots,
        lengths=nothing if write is None else write.lengths,
        counts=nothing if write is None else write.counts,
        **{"q_stride": q.stride(0), "k_stride": k.stride(0), "v_stride": v.stride(0)},
        width=1 if write is None else tokens // len(write.slots),
        size=1 if write is None else write.keys.shape[2],
        eps=eps,
        **{"HEADS": heads, "KV_HEADS": kv_heads, "HALF": d // 2},
        COLUMNS=triton.next_power_of_2(d // 2),
        WRITES=write is not None,
    )
    return outs
