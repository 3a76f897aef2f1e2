"""Attention by the compiled library, in bfloat16 with float32 sums or in float32.

A token's result depends neither on the other tokens of a call nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sfumato.ops.attention_reference import Causal, OwnKeys, SharedCausal
from sfumato.ops.cpu import library
from sfumato.ops.cpu.kernels import DTYPES, contiguous
from sfumato.ops.narrow_cache import FP8, Q8_0, is_narrow, stored_width, widened
from sfumato.ops.registry import is_off, twin

_CPU = torch.device("cpu")
EVERYTHING = 2**63 - 1  # a window that no two positions are apart
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
) -> bool:
    if q.shape[-1] % 32:
        return False
    if multiplies_bf16():
        return any(_wide(part.dtype, q.dtype) == torch.bfloat16 for part in keys)
    return q.dtype in DTYPES and all(packs(part.dtype, q.dtype) is not None for part in keys)


@twin("attend", "cpu", serves=_serves, refusal=_refusal, note=_SERVED)
def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """See `ops.attend`. Sums and softmax are in float32, products of what `packs` says."""
    tokens, heads, d = q.shape
    kv_heads, held = keys[0].shape[0], sum(part.shape[1] for part in keys)
    _check_parts(keys, values, kv_heads, d)
    assert causal is None or (causal.queries.shape, causal.keys.shape) == ((tokens,), (held,))
    given = contiguous(q)
    out = torch.empty_like(given)
    if tokens == 0:
        return out.to(q.dtype)
    # Named, so that they outlive the call.
    seen = (causal.queries.int(), causal.keys.int()) if causal else ()
    pointers: list[int | None]
    pointers = [positions.data_ptr() for positions in seen] if seen else [None, None]
    keys, values = ([_side_by_side(part, q.dtype) for part in parts] for parts in (keys, values))
    rows = _rows(keys, q.dtype), _rows(values, q.dtype)
    window = EVERYTHING if causal is None or causal.window is None else causal.window
    library.run(
        *("sf_attention", given.data_ptr(), DTYPES[given.dtype], tokens, heads),
        *(kv_heads, d, ctypes.addressof(rows[0]), ctypes.addressof(rows[1])),
        *(len(keys), *pointers, window, out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(q.dtype)


class SharedCall(ctypes.Structure):
    """`sf_shared_call` of csrc/sfumato.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "d")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("segments", "queries")),
        *((name, ctypes.c_void_p) for name in ("query_positions", "key_positions")),
        ("window", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_dtype", ctypes.c_int),
    )


def _serves_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own: Sequence[OwnKeys],
    causal: SharedCausal,
) -> bool:
    """Where the compiled `attend` serves each row, as it must to give the same bits."""
    if is_off("attend"):
        return False
    return len(own) > 0 and all(map(len, causal.queries)) and _serves(q, keys, values)


@twin("attend_shared", "cpu", serves=_serves_shared, refusal=_refusal, note=_SERVED)
def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own: Sequence[OwnKeys],
    causal: SharedCausal,
) -> Tensor:
    """See `ops.attend_shared`. The prefix is packed once for all rows."""
    heads, d = q.shape[1:]
    kv_heads = k.shape[1]
    given, new_keys, new_values = contiguous(q), contiguous(k), contiguous(v)
    out = torch.empty_like(given)
    assert k.shape == v.shape == (len(k), kv_heads, d), f"{k.shape} and {v.shape} for {q.shape}"
    for parts in ((keys, values), *((row.keys, row.values) for row in own)):
        _check_parts(*parts, kv_heads, d)
    # Named, so that they outlive the call.
    stored = [[_side_by_side(part, q.dtype) for part in parts] for parts in (keys, values)]
    beside = [
        [[_side_by_side(part, q.dtype) for part in parts] for parts in (row.keys, row.values)]
        for row in own
    ]
    key_rows, value_rows = (list(_entries(parts, q.dtype)) for parts in stored)
    first = 0
    for row, (row_keys, row_values) in zip(own, beside, strict=True):
        key_rows += [*_entries(row_keys, q.dtype), _packed(new_keys, first, row.new)]
        value_rows += [*_entries(row_values, q.dtype), _packed(new_values, first, row.new)]
        first += row.new
    assert first == len(k) and sum(entry.count for entry in key_rows) == len(causal.all_keys)
    arrays = (KeyRows * len(key_rows))(*key_rows), (KeyRows * len(value_rows))(*value_rows)
    counts = ctypes.c_int64 * len(own)
    segments = counts(*(len(row.keys) + 1 for row in own))
    queries = counts(*map(len, causal.queries))
    assert sum(queries) == len(q)
    call = SharedCall(
        *(given.data_ptr(), DTYPES[given.dtype], len(own), heads, kv_heads, d),
        *(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), len(keys)),
        *(ctypes.addressof(segments), ctypes.addressof(queries)),
        *(causal.all_queries.data_ptr(), causal.all_keys.data_ptr()),
        *(EVERYTHING if causal.window is None else causal.window, out.data_ptr()),
        DTYPES[out.dtype],
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


def _serves_canvas(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, *rest: Tensor) -> bool:
    stored = is_narrow(keys.dtype) or keys.dtype in DTYPES
    known = q.dtype in DTYPES and stored and keys.is_contiguous()
    known = known and k.dtype == v.dtype == q.dtype
    return known and rest[0].is_contiguous() and _serves(q, [keys, k], [])


@twin("canvas_attention", "cpu", serves=_serves_canvas, refusal=_refusal, note=_SERVED)
def canvas_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    held: Tensor,
    width: Tensor,
) -> Tensor:
    """See `ops.canvas_attention`. Each row as `attend` has it; zeros after its width."""
    rows, length, heads, d = q.shape
    stored, kv_heads, size, _ = keys.shape
    assert keys.shape == values.shape and keys.dtype == values.dtype
    assert k.shape == v.shape == (rows, length, kv_heads, d)
    assert keys.shape[3] == stored_width(d, keys.dtype)
    numbers = [each.to(torch.int64).contiguous() for each in (slots, held, width)]
    assert all(each.shape == (rows,) for each in numbers)
    out = torch.zeros(q.shape, dtype=q.dtype)
    if out.numel() == 0:
        return out
    # Named, so that they outlive the call.
    new = [x.contiguous() for x in (q, k, v)]
    call = CanvasCall(
        *(x.data_ptr() for x in (*new, keys, values)),
        *(DTYPES[q.dtype], _number(keys.dtype, q.dtype), rows, length, heads, kv_heads, d),
        *(stored, size),
        *(x.data_ptr() for x in (*numbers, out)),
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
    return (KeyRows * len(parts))(*_entries(parts, activations))


def _entries(parts: Sequence[Tensor], activations: torch.dtype) -> Iterator[KeyRows]:
    for part in parts:
        number = _number(part.dtype, activations)
        yield KeyRows(part.data_ptr(), number, part.shape[1], *part.stride()[:2])


def _packed(new: Tensor, first: int, count: int) -> KeyRows:
    """Tokens first..first + count - 1 of [tokens, kv_heads, d], contiguous."""
    at = new.data_ptr() + first * new.stride(0) * new.element_size()
    return KeyRows(at, DTYPES[new.dtype], count, new.stride(1), new.stride(0))
