"""The update of an online softmax state by the compiled library.

A position's result depends neither on the other positions of a call nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.kernels import DTYPES, contiguous
from sfumato.ops.online_softmax import BLOCK, TOP, Bans, SoftmaxState
from sfumato.ops.registry import twin


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


def _known_dtype(*arguments: Any) -> bool:
    return library.kernels is not None and arguments[5] in DTYPES


@twin("update_softmax", "cpu", serves=_known_dtype, refusal=library.refusal)
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
    kernels = library.loaded()
    kernels.run("sf_softmax_update", kernels.level, ctypes.addressof(call))
    return mass, sums, fade
