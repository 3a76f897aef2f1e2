"""The operations that the compiled library has, with the signatures of `ops/reference.py`.

They are not differentiable, and want everything on the CPU.  A row's result depends neither on the
other rows of a call nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.ops.online_softmax import BLOCK, TOP, Bans, SoftmaxState
from sfumato.ops.reference import Causal
from sfumato.ops.registry import BLOCKS, PANELS, twin
from sfumato.weights.blocks import QuantizedTensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What activations may be, by their number in the library."""


def multiplies_bf16() -> bool:
    """Whether the library multiplies bfloat16 with instructions of its own."""
    return library.kernels is not None and library.kernels.bf16


EVERYTHING = 2**63 - 1  # a window that no two positions are apart


@twin("linear", "cpu", PANELS)
def linear(x: Tensor, weight: PackedTensor, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype."""
    rows, columns = weight.shape
    assert x.shape[-1] == columns, f"{x.shape} by {weight.shape}"
    kernels, given = library.loaded(), _given(x)
    out = given.new_empty(*x.shape[:-1], rows)
    if x.numel() == 0:
        return out.to(x.dtype)
    kernels.run(
        *("sf_linear", kernels.level, weight.mode, weight.kind, weight.data.data_ptr()),
        *(rows, columns, given.data_ptr(), DTYPES[given.dtype], given.numel() // columns),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin("experts", "cpu", PANELS)
def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: PackedTensor, down: PackedTensor
) -> Tensor:
    """A gated-GELU mixture of experts; see the reference.

    Raises ValueError for an expert that there is not.
    """
    count, hidden, inner = down.shape
    assert gate_up.shape == (count, 2 * inner, hidden) and x.shape[-1] == hidden
    assert chosen.shape == shares.shape == (len(x), chosen.shape[-1])
    assert chosen.dtype == torch.int64, f"choices are int64, not {chosen.dtype}"
    kernels, given = library.loaded(), _given(x)
    chosen, shares = chosen.contiguous(), shares.float().contiguous()
    out = torch.zeros_like(given)
    if chosen.numel() == 0:
        return out.to(x.dtype)
    # Where the two differ, as with one of them in bfloat16, the more exact serves both.
    mode = max(gate_up.mode, down.mode)
    kernels.run(
        *("sf_experts", kernels.level, mode, gate_up.kind, gate_up.data.data_ptr()),
        *(down.kind, down.data.data_ptr(), count, hidden, inner),
        *(given.data_ptr(), DTYPES[given.dtype], len(given)),
        *(chosen.data_ptr(), shares.data_ptr(), chosen.shape[-1]),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin("dense", "cpu", BLOCKS, serves=lambda *_: library.kernels is not None)
def dequantize(weight: QuantizedTensor, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """All elements, bit for bit those of `weight.dequantize`: a new tensor, or `spare` where that
    is given, contiguous and `dtype` is one of DTYPES."""
    out = spare if dtype in DTYPES else None
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype if dtype in DTYPES else torch.float32)
    if out.numel() == 0:
        return out.to(dtype)
    kernels = library.loaded()
    kernels.run(
        *("sf_dequantize", kernels.level, weight.format.ggml_type, weight.data.data_ptr()),
        *(out.numel(), out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(dtype)


class _Rows(ctypes.Structure):
    """`sf_rows` of csrc/sfumato.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("count", "head_stride", "row_stride")),
    )


def _stored_in_bf16(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
) -> bool:
    stored = any(part.dtype == torch.bfloat16 for part in keys)
    return stored and q.shape[-1] % 32 == 0 and multiplies_bf16()


@twin("attend", "cpu", serves=_stored_in_bf16)
def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """See `ops.attend`. Products are of bfloat16, sums and softmax in float32."""
    tokens, heads, d = q.shape
    kv_heads, held = keys[0].shape[0], sum(part.shape[1] for part in keys)
    for key, value in zip(keys, values, strict=True):
        assert key.shape == value.shape == (kv_heads, key.shape[1], d), f"{key.shape} for {q.shape}"
    assert causal is None or (causal.queries.shape, causal.keys.shape) == ((tokens,), (held,))
    given = _given(q)
    out = torch.empty_like(given)
    if tokens == 0:
        return out.to(q.dtype)
    # Named, so that they outlive the call.
    seen = (causal.queries.int(), causal.keys.int()) if causal else ()
    pointers: list[int | None]
    pointers = [positions.data_ptr() for positions in seen] if seen else [None, None]
    keys, values = ([_side_by_side(part) for part in parts] for parts in (keys, values))
    rows = _rows(keys), _rows(values)
    window = EVERYTHING if causal is None or causal.window is None else causal.window
    library.loaded().run(
        *("sf_attention", given.data_ptr(), DTYPES[given.dtype], tokens, heads),
        *(kv_heads, d, ctypes.addressof(rows[0]), ctypes.addressof(rows[1])),
        *(len(keys), *pointers, window, out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(q.dtype)


def _side_by_side(part: Tensor) -> Tensor:
    """Keys or values as the library takes them: rows at any stride, a row's numbers at none."""
    part = part if part.dtype in DTYPES else part.float()
    return part if part.stride(-1) == 1 else part.contiguous()


def _rows(parts: Sequence[Tensor]) -> ctypes.Array[_Rows]:
    made = (
        _Rows(part.data_ptr(), DTYPES[part.dtype], part.shape[1], *part.stride()[:2])
        for part in parts
    )
    return (_Rows * len(parts))(*made)


def _known_dtype(*arguments: Any) -> bool:
    return library.kernels is not None and arguments[5] in DTYPES


@twin("update_softmax", "cpu", serves=_known_dtype)
def update(
    state: SoftmaxState,
    raw: Tensor,
    first_id: int,
    temperature: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.update_softmax`."""
    positions, count = raw.shape
    assert temperature.shape == state.max.shape == (positions,), f"{temperature.shape}, {raw.shape}"
    assert state.top.shape == state.top_ids.shape == (positions, TOP)
    assert state.argmax.dtype == state.top_ids.dtype == torch.int64
    assert (
        state.max.dtype
        == state.sum_exp.dtype
        == state.sum_shifted.dtype
        == state.top.dtype
        == torch.float32
    )
    mass = torch.empty(positions, count, dtype=dtype)
    sums, fade = torch.empty(positions, -(-count // BLOCK)), torch.empty(positions)
    if positions == 0:
        return mass, sums, fade
    fields = (state.max, state.sum_exp, state.sum_shifted, state.argmax, state.top, state.top_ids)
    banned = () if bans is None else bans.lists
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in banned)
    assert bans is None or bans.row.shape == bans.place.shape == (positions,)
    lists: list[int | None] = [part.data_ptr() for part in banned]
    lists = lists or [None] * 3
    kernels, given, heat = library.loaded(), _given(raw), temperature.float().contiguous()
    kernels.run(
        *(
            "sf_softmax_update",
            kernels.level,
            given.data_ptr(),
            DTYPES[given.dtype],
            positions,
            count,
        ),
        *(first_id, softcap or 0.0, heat.data_ptr()),
        *(*lists, len(banned[2]) if banned else 0),
        *(part.data_ptr() for part in (*fields, fade, sums, mass)),
        DTYPES[dtype],
    )
    return mass, sums, fade


def _given(x: Tensor) -> Tensor:
    """Activations as the library takes them: contiguous, and of a dtype that it knows."""
    return (x if x.dtype in DTYPES else x.float()).contiguous()
