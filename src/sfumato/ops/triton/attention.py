"""Attention of canvases over what their slots hold and themselves, all rows in one launch.

`canvas_attention` serves rows that denoise, and `phase_attention` rows that denoise beside rows
that commit, which see causally.  Lengths, slots and phases are read on the device, so that a
captured graph serves whatever they become.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.narrow_cache import is_narrow, stored_as, widened
from sfumato.ops.triton.attention_kernels import attend, merge
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.narrow_cache import (
    attended,
    cache_of,
    checks_of,
    held_matrix,
    narrow,
)
from sfumato.ops.triton.operands import EVERYTHING
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    error_bound,
    random_like,
    sizes_for,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.workspaces import NARROW, attention_kernel

_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16:16"),
    **dict.fromkeys(("keys", "values", "new_keys", "new_values"), "tensordesc<bf16[{KEYS}, {D}]>"),
    **dict.fromkeys(("slots", "first", "width", "commits"), "*i64"),
    **dict.fromkeys(("partial", "extremes"), "*fp32:16"),
    **dict.fromkeys(("size", "tokens", "stored", "window"), "i32"),
    "length": "i32",
}

NARROW_TYPES = {**_TYPES, **dict.fromkeys(("keys", "values"), "*u8:16")}

_DENOISE = {"denoise": {"PHASES": False, "WINDOWED": False}}  # the usual step: no row commits

SLIDING = register(
    Kernel(
        "attention_256",
        attend,
        _TYPES,
        {"HEADS": 16, "KV_HEADS": 8, "D": 256, "PHASES": True, "WINDOWED": True, "CACHE": 0},
        _DENOISE,
    )
)
FULL = register(
    Kernel(
        "attention_512",
        attend,
        _TYPES,
        {"HEADS": 16, "KV_HEADS": 2, "D": 512, "PHASES": True, "WINDOWED": False, "CACHE": 0},
        _DENOISE,
    )
)
NARROW_SLIDING, NARROW_FULL = (register(narrow(kernel, NARROW_TYPES)) for kernel in (SLIDING, FULL))
MERGE = register(
    Kernel(
        "attention_merge",
        merge,
        {
            **dict.fromkeys(("partial", "extremes"), "*fp32:16"),
            "first": "*i64",
            "out": "*bf16:16",
            **dict.fromkeys(("pairs", "size", "pieces"), "i32"),
        },
        {"D": 512, "SPLIT": 4096},
    )
)


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
    """See `ops.canvas_attention`; floats are bfloat16. Positions after a row's width see what the
    others of the row see. A width is at least 1, or `held` at most 0 beside a width of 0."""
    return _attention(q, k, v, keys, values, slots, held, width, None, None)


def phase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    width: Tensor,
    commits: Tensor,
    window: int | None,
) -> Tensor:
    """See `ops.phase_attention`; floats are bfloat16. Positions after a row's width see what the
    last position of the width sees."""
    return _attention(q, k, v, keys, values, slots, first, width, commits, window)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    width: Tensor,
    commits: Tensor | None,
    window: int | None,
) -> Tensor:
    rows, length, heads, d = q.shape
    kv_heads, size = keys.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (x.contiguous() for x in (q, k, v))
    slots, first, width = (x.contiguous() for x in (slots, first, width))
    kernels = (NARROW_SLIDING, NARROW_FULL) if is_narrow(keys.dtype) else (SLIDING, FULL)
    kernel = kernels[d > NARROW]
    tile = tile_for(kernel.name, q.device)
    pieces = triton.cdiv(size, tile["SPLIT"])
    # One piece stores its result at once, and no program touches these. Their dtype is the same, so
    # that the code is.
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    partial = extremes = torch.empty(0, **wide)
    if pieces > 1:
        partial = torch.empty(rows, pieces, length * heads, d, **wide)
        extremes = torch.empty(rows, pieces, length * heads, 2, **wide)
    floats: dict[str, Any] = {"q": q, "out": out, "partial": partial, "extremes": extremes}
    matrices: dict[str, Any] = {"new_keys": k.flatten(-2), "new_values": v.flatten(-2)}
    matrices |= {"keys": keys, "values": values}
    descriptors = {name: held_matrix(x, tile["KEYS"], d) for name, x in matrices.items()}
    numbers: dict[str, Any] = {"length": length, "size": size, "tokens": rows * length}
    constants: dict[str, Any] = {"HEADS": heads, "KV_HEADS": kv_heads, "D": d}
    launch(
        kernel,
        (triton.cdiv(length * (heads // kv_heads), tile["ROWS"]), kv_heads * pieces, rows),
        tile,
        q.device,
        **floats,
        **descriptors,
        slots=slots,
        first=first,
        width=width,
        commits=first if commits is None else commits.contiguous(),
        **numbers,
        stored=keys[..., 0].numel(),
        window=EVERYTHING if window is None else window,
        **constants,
        CACHE=cache_of(keys),
        PHASES=commits is not None,
        WINDOWED=commits is not None and window is not None,
    )
    if pieces > 1:
        merge_pieces(partial, extremes, first, out, size, tile["SPLIT"])
    return out


def merge_pieces(
    partial: Tensor, extremes: Tensor, first: Tensor, out: Tensor, size: int, split: int
) -> None:
    """Fills the rows of `out` [rows, n, heads, d] whose prefix is several pieces."""
    rows, pieces, pairs, d = partial.shape
    tile = tile_for("attention_merge", out.device)
    tensors: dict[str, Any] = {"partial": partial, "extremes": extremes, "first": first, "out": out}
    numbers: dict[str, Any] = {"pairs": pairs, "size": size, "pieces": pieces}
    launch(
        MERGE,
        (triton.cdiv(pairs, tile["PAIRS"]), rows),
        tile,
        out.device,
        **tensors,
        **numbers,
        D=d,
        SPLIT=split,
    )


def _serves(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> bool:
    d = q.shape[-1]
    shaped = 16 <= d <= 512 and d & (d - 1) == 0
    stored = keys.is_contiguous() and values.is_contiguous() and keys[..., 0].numel() < 2**31
    numbers = all(x.dtype == torch.int64 for x in rest if isinstance(x, Tensor))
    return shaped and stored and numbers and attended((q, k, v), (keys, values))


def _check(device: torch.device, kind: torch.dtype | None = None) -> None:
    """Narrow heads, and those of the 26B-A4B over prefixes of two pieces, in a cache of this
    kind."""
    wide = [
        (heads, kv_heads, d, tile_for(attention_kernel(d), device)["SPLIT"] + 404)
        for heads, kv_heads, d in ((16, 8, 256), (16, 2, 512))
    ]
    for heads, kv_heads, d, size in sizes_for(device, [(4, 2, 64, 150)], wide):
        _check_heads(heads, kv_heads, d, size, device, kind)


def _check_heads(
    heads: int, kv_heads: int, d: int, size: int, device: torch.device, kind: torch.dtype | None
) -> None:
    """Rows of all lengths, of which one has no prefix and one a full ring, over stale NaN."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    n, before = 24, size - 20
    q, k, v, keys, values = random_like(
        *(device, dtype, (3, n, heads, d), (3, n, kv_heads, d), (3, n, kv_heads, d)),
        *((3, kv_heads, size, d), (3, kv_heads, size, d)),
    )
    q = q * d**-0.5
    slots, first, width, commits = (
        torch.tensor(numbers, device=device)
        for numbers in ([2, 0, 1], [before, 0, 2 * size + 100], [24, 7, 20], [0, 1, 1])
    )
    for stored in (keys, values):
        stored[2, :, before:] = stored[0] = float("nan")
    keys, values = (stored_as(x, kind or dtype) for x in (keys, values))
    wide_keys, wide_values = (x.double() for x in widened([keys, values], dtype))
    wide = q.double(), k.double(), v.double(), wide_keys, wide_values
    held = first.clamp(max=size)
    inside = torch.arange(n, device=device) < width[:, None]
    out = canvas_attention(q, k, v, keys, values, slots, held, width)
    expected = attention_reference.canvas_attention.reference(*wide, slots, held, width)
    assert_close(out[inside], expected[inside], 2 * error_bound(dtype))
    rest = slots, first, width, commits, 140
    out = phase_attention(q, k, v, keys, values, *rest)
    expected = attention_reference.phase_attention.reference(*wide, *rest)
    assert_close(out[inside], expected[inside], 2 * error_bound(dtype))


TWINS = {
    name: KernelTwin(name, function, _serves, check)
    for operation, function in (
        ("canvas_attention", canvas_attention),
        ("phase_attention", phase_attention),
    )
    for name, check in checks_of(operation, _check).items()
}
