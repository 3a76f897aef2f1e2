"""Operations by the compiled library: products with packed weights, dequantization, gates, RMS norm
and rotary embedding (one pass, rounded once), and the update of an online softmax state.

A row's result depends neither on the other rows of a call nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor, knows
from sfumato.ops.online_softmax import BLOCK, TOP, Bans, SoftmaxState
from sfumato.ops.reference import Gating
from sfumato.ops.registry import PANELS, twin
from sfumato.weights.formats import BLOCKS, QuantizedTensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What activations may be, by their number in the library."""

GATINGS: dict[Gating, int] = {"gelu": 0, "silu": 1}
"""The functions of a gate, by their number in the library."""


_PACKED = "weights that are packed for it"


def contiguous(x: Tensor) -> Tensor:
    """Activations as the library takes them: contiguous, and of a dtype that it knows."""
    return (x if x.dtype in DTYPES else x.float()).contiguous()


@twin("linear", "cpu", PANELS, refusal=library.refusal, note=_PACKED)
def linear(x: Tensor, weight: PackedTensor, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype."""
    rows, columns = weight.shape
    assert x.shape[-1] == columns, f"{x.shape} by {weight.shape}"
    given = contiguous(x)
    out = given.new_empty(*x.shape[:-1], rows)
    if x.numel() == 0:
        return out.to(x.dtype)
    library.run(
        *("sf_linear", weight.mode, weight.kind, weight.data.data_ptr()),
        *(rows, columns, given.data_ptr(), DTYPES[given.dtype], given.numel() // columns),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin("experts", "cpu", PANELS, refusal=library.refusal, note=_PACKED)
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: PackedTensor,
    down: PackedTensor,
    gating: Gating = "gelu",
) -> Tensor:
    """A mixture of gated experts; see the reference.

    Raises ValueError for the number of an expert that does not exist.
    """
    count, hidden, inner = down.shape
    assert gate_up.shape == (count, 2 * inner, hidden) and x.shape[-1] == hidden
    assert chosen.shape == shares.shape == (len(x), chosen.shape[-1])
    assert chosen.dtype == torch.int64, f"choices are int64, not {chosen.dtype}"
    given = contiguous(x)
    chosen, shares = chosen.contiguous(), shares.float().contiguous()
    out = torch.zeros_like(given)
    if chosen.numel() == 0:
        return out.to(x.dtype)
    # Where the two differ, as with one of them in bfloat16, the more exact serves both.
    mode = max(gate_up.mode, down.mode)
    library.run(
        *("sf_experts", mode, gate_up.kind, gate_up.data.data_ptr()),
        *(down.kind, down.data.data_ptr(), count, hidden, inner),
        *(given.data_ptr(), DTYPES[given.dtype], len(given)),
        *(chosen.data_ptr(), shares.data_ptr(), chosen.shape[-1], GATINGS[gating]),
        *(out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(x.dtype)


@twin(
    *("dense", "cpu", BLOCKS),
    serves=lambda weight, *_: library.kernels is not None and knows(weight.format),
    refusal=library.refusal,
    note="quantized weights",
)
def dequantize(weight: QuantizedTensor, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """All elements, bit for bit those of `weight.dequantize`: a new tensor, or `spare` where that
    is given, contiguous and `dtype` is one of DTYPES."""
    out = spare if dtype in DTYPES else None
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype if dtype in DTYPES else torch.float32)
    if out.numel() == 0:
        return out.to(dtype)
    library.run(
        *("sf_dequantize", weight.format.ggml_type, weight.data.data_ptr()),
        *(out.numel(), out.data_ptr(), DTYPES[out.dtype]),
    )
    return out.to(dtype)


def _known(x: Tensor, other: Tensor | None, *_: object) -> bool:
    """Whether the library knows the dtypes."""
    known = x.dtype in DTYPES and (other is None or other.dtype in DTYPES)
    return known and library.kernels is not None


def _same_dtype(x: Tensor, *others: Tensor) -> bool:
    same = x.dtype in DTYPES and all(other.dtype == x.dtype for other in others)
    return same and library.kernels is not None


@twin("gated", "cpu", serves=lambda gate, up, _: _same_dtype(gate, up), refusal=library.refusal)
def gated(gate: Tensor, up: Tensor, gating: Gating = "gelu") -> Tensor:
    """See `ops.gated`. Both may be parts of the columns of a wider tensor."""
    assert gate.shape == up.shape, f"{gate.shape} and {up.shape}"
    columns = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype)
    if out.numel() == 0:
        return out
    gate, up = _rows(gate), _rows(up)
    library.run(
        *("sf_gated", gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0)),
        *(DTYPES[gate.dtype], GATINGS[gating], len(gate), columns, out.data_ptr()),
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., columns] → [rows, columns], whose rows may lie apart."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) >= 0 else rows.contiguous()


@twin("rms_norm", "cpu", serves=_known, refusal=library.refusal)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    columns = x.shape[-1]
    assert weight is None or weight.shape == (columns,), f"{x.shape} by {weight.shape}"
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    weight = weight if weight is None else weight.contiguous()
    scale = (None, 0) if weight is None else (weight.data_ptr(), DTYPES[weight.dtype])
    library.run(
        *("sf_rms_norm", x.data_ptr(), DTYPES[x.dtype], x.numel() // columns),
        *(columns, *scale, eps, out.data_ptr()),
    )
    return out


@twin("rotate", "cpu", serves=_same_dtype, refusal=library.refusal)
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ops.rotate`."""
    *tokens, heads, size = x.shape
    half = size // 2
    assert cos.shape == sin.shape == (*tokens, half), f"{x.shape} by {cos.shape}"
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    library.run(
        *("sf_rotate", x.data_ptr(), DTYPES[x.dtype], math.prod(tokens), heads),
        *(half, cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
    )
    return out


class SoftmaxCall(ctypes.Structure):
    """`sf_softmax_call` of csrc/sfumato.h."""

    _fields_ = (
        ("raw", c_void_p),
        ("raw_dtype", c_int),
        *((name, c_int64) for name in ("positions", "count", "first_id")),
        ("softcap", c_float),
        *((name, c_void_p) for name in ("temperature", "ban_first", "ban_last", "ban_ids")),
        ("bans", c_int64),
        *((name, c_void_p) for name in ("max", "sum_exp", "sum_shifted", "argmax")),
        *((name, c_void_p) for name in ("top", "top_ids", "fade", "block_sums", "mass")),
        ("mass_dtype", c_int),
    )


@twin(
    *("update_softmax", "cpu"),
    serves=lambda *given: library.kernels is not None and given[5] in DTYPES,
    refusal=library.refusal,
)
def update_softmax(
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
    banned = () if bans is None else bans.lists
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in banned)
    assert bans is None or bans.row.shape == bans.place.shape == (positions,)
    first, last, ids = (part.data_ptr() for part in banned) if banned else (None, None, None)
    # Named, so that they outlive the call.
    scores, temperatures = contiguous(raw), temperature.float().contiguous()
    call = SoftmaxCall(
        *(scores.data_ptr(), DTYPES[scores.dtype], positions, count, first_id, softcap or 0.0),
        *(temperatures.data_ptr(), first, last, ids, len(banned[2]) if banned else 0),
        *(state.max.data_ptr(), state.sum_exp.data_ptr(), state.sum_shifted.data_ptr()),
        *(state.argmax.data_ptr(), state.top.data_ptr(), state.top_ids.data_ptr()),
        *(fade.data_ptr(), sums.data_ptr(), mass.data_ptr(), DTYPES[dtype]),
    )
    library.run("sf_softmax_update", ctypes.addressof(call))
    return mass, sums, fade
