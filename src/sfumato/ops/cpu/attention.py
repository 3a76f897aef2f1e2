"""Attention by the compiled library, in bfloat16 with float32 sums or in float32.

A token's result depends neither on the other tokens of a call nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.ops.attention_reference import Causal, Own, Rows
from sfumato.ops.cpu import library
from sfumato.ops.cpu.kernels import DTYPES, contiguous
from sfumato.ops.narrow_cache import FP8, Q8_0, is_narrow, stored_width, widened
from sfumato.ops.registry import twin

_CPU = torch.device("cpu")
_FP8, _Q8_0, _Q8_0_BF16 = 2, 3, 4  # see csrc/sfumato.h


WINDOWS = {torch.bfloat16: 8192, torch.float32: 1024}
"""Keys that are packed at a time, by what is multiplied: WINDOW of csrc/attention_*.inc."""


def multiplies_bf16(device: torch.device = _CPU) -> bool:
    """Whether the library uses the processor's bfloat16 instructions on a device."""
    return device.type == "cpu" and library.kernels is not None and library.kernels.bf16


def packs(stored: torch.dtype, activations: torch.dtype) -> torch.dtype | None:
    """What keys and values that are stored as `stored` are packed as; None where torch attends."""
    numbers = None if library.kernels is None else library.kernels.attention
    wide = _wide(stored, activations)
    # Those in float32 stay with torch where products of bfloat16 would round them.
    known = wide == torch.bfloat16 if numbers == torch.bfloat16 else wide in DTYPES
    return numbers if known else None


def _wide(stored: torch.dtype, activations: torch.dtype) -> torch.dtype:
    """What stored keys and values are read as: those of a narrow cache as activations are."""
    return activations if is_narrow(stored) else stored


def _number(stored: torch.dtype, activations: torch.dtype) -> int:
    """How the library names a dtype of keys and values."""
    if stored == Q8_0:
        return _Q8_0_BF16 if activations == torch.bfloat16 else _Q8_0
    return _FP8 if stored == FP8 else DTYPES[stored]


def _refusal(device: torch.device) -> str:
    """Why the library attends to nothing; empty where it does."""
    if library.kernels is not None and library.kernels.attention is None:
        return f"{library.kernels.isa} has no attention of its own"
    return library.refusal(device)


_SERVED = "keys that are stored in bfloat16" if multiplies_bf16() else ""


class KeyRows(ctypes.Structure):
    """`sf_rows` of csrc/sfumato.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("count", "head_stride", "row_stride")),
    )


def _serves(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> bool:
    """Rows that follow a prefix are served where each of them is when it is alone."""
    if q.shape[-1] % 32 or (causal and not all(queries for queries, _ in causal.counts)):
        return False
    return all(_attends(q, (*keys, *row.keys)) for row in own) if own else _attends(q, keys)


def _attends(q: Tensor, keys: Sequence[Tensor]) -> bool:
    """Whether the library attends to keys in parts."""
    if multiplies_bf16():
        return any(_wide(part.dtype, q.dtype) == torch.bfloat16 for part in keys)
    return q.dtype in DTYPES and all(packs(part.dtype, q.dtype) is not None for part in keys)


class SharedCall(ctypes.Structure):
    """`sf_shared_call` of csrc/sfumato.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "d")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("segments", "queries")),
        *((name, ctypes.c_void_p) for name in ("first", "last", "key_positions", "out")),
        ("out_dtype", ctypes.c_int),
    )


@twin("attend", "cpu", serves=_serves, refusal=_refusal, note=_SERVED)
def attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> Tensor:
    """See `ops.attend`. Sums and softmax are in float32, products of what `packs` says. A prefix
    that several rows follow is packed once for all of them."""
    tokens, heads, d = q.shape
    kv_heads = keys[0].shape[0]
    prefix = [Own(keys, values)]
    shared, rows = (prefix, own) if own else ([], prefix)
    for each in (*shared, *rows):
        _check_parts(each.keys, each.values, kv_heads, d)
    given = contiguous(q)
    out = torch.empty_like(given)
    if tokens == 0:
        return out.to(q.dtype)
    # Named, so that they outlive the call.
    all_keys, all_values = (
        [_side_by_side(part, q.dtype) for each in (*shared, *rows) for part in parts(each)]
        for parts in (lambda each: each.keys, lambda each: each.values)
    )
    arrays = _rows(all_keys, q.dtype), _rows(all_values, q.dtype)
    counts = ctypes.c_int64 * len(rows)
    segments = counts(*(len(row.keys) for row in rows))
    held = sum(part.shape[1] for part in all_keys)
    sizes = causal.counts if own and causal else [(tokens, held)]
    assert len(sizes) == len(rows), f"{len(sizes)} for {len(rows)} rows"
    queries = counts(*(count for count, _ in sizes))
    positions = causal.numbers if causal else ()
    expected = [sum(queries), tokens, held] if causal else []
    assert [len(each) for each in positions] == expected
    call = SharedCall(
        *(given.data_ptr(), DTYPES[given.dtype], len(rows), heads, kv_heads, d),
        *(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), len(keys) if own else 0),
        *(ctypes.addressof(segments), ctypes.addressof(queries)),
        *([each.data_ptr() for each in positions] or (None, None, None)),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    library.run("sf_shared_attention", ctypes.addressof(call))
    return out.to(q.dtype)


class CanvasCall(ctypes.Structure):
    """`sf_canvas_call` of csrc/sfumato.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "keys", "values")),
        *((name, ctypes.c_int) for name in ("dtype", "stored_dtype")),
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "kv_heads", "d")),
        *((name, ctypes.c_int64) for name in ("stored", "size")),
        *((name, ctypes.c_void_p) for name in ("slots", "held", "width", "out")),
    )


def _serves_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> bool:
    known = is_narrow(rows.keys.dtype) or rows.keys.dtype in DTYPES
    known = known and q.dtype in DTYPES and k.dtype == v.dtype == q.dtype and rows.plain
    contiguous = rows.keys.is_contiguous() and rows.values.is_contiguous()
    return known and contiguous and _serves(q, [rows.keys, k], [])


@twin("attend_padded", "cpu", serves=_serves_padded, refusal=_refusal, note=_SERVED)
def attend_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """See `ops.attend_padded`. Each canvas as `attend` has it; zeros after its width."""
    count, length, heads, d = q.shape
    keys, values = rows.keys, rows.values
    stored, kv_heads, size, _ = keys.shape
    assert keys.shape == values.shape and keys.dtype == values.dtype
    assert k.shape == v.shape == (count, length, kv_heads, d)
    assert keys.shape[3] == stored_width(d, keys.dtype)
    numbers = rows.slots, rows.first.clamp(max=size), rows.widths(length)
    assert all(each.shape == (count,) and each.dtype == torch.int64 for each in numbers)
    out = torch.zeros(q.shape, dtype=q.dtype)
    if out.numel() == 0:
        return out
    # Named, so that they outlive the call.
    given = [x.contiguous() for x in (q, k, v, keys, values, *numbers)]
    call = CanvasCall(
        *(x.data_ptr() for x in given[:5]),
        *(DTYPES[q.dtype], _number(keys.dtype, q.dtype), count, length, heads, kv_heads, d),
        *(stored, size),
        *(x.data_ptr() for x in (*given[5:], out)),
    )
    library.run("sf_canvas_attention", ctypes.addressof(call))
    return out


def _check_parts(keys: Sequence[Tensor], values: Sequence[Tensor], kv_heads: int, d: int) -> None:
    for key, value in zip(keys, values, strict=True):
        expected = kv_heads, key.shape[1], stored_width(d, key.dtype)
        assert key.shape == value.shape == expected, f"{key.shape} and {value.shape}"
        # FP8 and what is wide are as long as one another.
        assert (key.dtype == Q8_0) == (value.dtype == Q8_0), f"{key.dtype} and {value.dtype}"


def _side_by_side(part: Tensor, activations: torch.dtype) -> Tensor:
    """Keys or values as the library takes them: rows at any stride, a row's numbers at none."""
    if is_narrow(part.dtype) and activations not in DTYPES:
        part = widened([part], activations)[0]
    part = part if part.dtype in DTYPES or is_narrow(part.dtype) else part.float()
    return part if part.stride(-1) == 1 else part.contiguous()


def _rows(parts: Sequence[Tensor], activations: torch.dtype) -> ctypes.Array[KeyRows]:
    return (KeyRows * len(parts))(
        *(
            KeyRows(
                part.data_ptr(), _number(part.dtype, activations), part.shape[1], *part.stride()[:2]
            )
            for part in parts
        )
    )
