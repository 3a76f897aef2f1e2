"""Attention of reads: canvases over what their slots hold and questions beside these, all rows in
one launch. Slots, lengths and places are read on the device, so that a captured graph serves
whatever they become."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import Prefixes, Questions
from sfumato.ops.narrow_cache import is_narrow, stored_as, widened
from sfumato.ops.triton.attention import merge_pieces
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.narrow_cache import (
    attended,
    cache_of,
    checks_of,
    held_matrix,
    narrow,
)
from sfumato.ops.triton.operands import EVERYTHING
from sfumato.ops.triton.read_kernels import attend_read
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    error_bound,
    random_like,
    sizes_for,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.workspaces import NARROW, read_kernel

_MATRICES = ("new_keys", "new_values", "keys", "values", "own_keys", "own_values")
_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16:16"),
    **dict.fromkeys(_MATRICES, "tensordesc<bf16[{KEYS}, {D}]>"),
    **dict.fromkeys(("slots", "first", "starts", "counts"), "*i64"),
    **dict.fromkeys(("partial", "extremes"), "*fp32:16"),
    **dict.fromkeys(("length", "size", "places", "tokens", "stored", "beside", "window"), "i32"),
}

_NARROW_TYPES = {**_TYPES, **dict.fromkeys(_MATRICES[2:], "*u8:16")}
_WIDE = {"HEADS": 16, "KV_HEADS": 8, "D": 256, "WINDOWED": True, "CACHE": 0}
_WIDER = {"HEADS": 16, "KV_HEADS": 2, "D": 512, "WINDOWED": False, "CACHE": 0}
SLIDING = register(Kernel("read_256", attend_read, _TYPES, _WIDE))
FULL = register(Kernel("read_512", attend_read, _TYPES, _WIDER))
NARROW_SLIDING, NARROW_FULL = (
    register(narrow(kernel, _NARROW_TYPES)) for kernel in (SLIDING, FULL)
)


def read_attention(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, questions: Questions
) -> Tensor:
    """See `ops.read_attention`; floats are bfloat16."""
    rows, length, heads, d = q.shape
    kv_heads, size = prefixes.keys.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (x.contiguous() for x in (q, k, v))
    cached = prefixes.keys
    kernels = (NARROW_SLIDING, NARROW_FULL) if is_narrow(cached.dtype) else (SLIDING, FULL)
    kernel = kernels[d > NARROW]
    tile = tile_for(kernel.name, q.device)
    pieces = triton.cdiv(size, tile["SPLIT"])
    # One piece stores its result at once, and no program touches these.
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    partial = extremes = torch.empty(0, **wide)
    if pieces > 1:
        partial = torch.empty(rows, pieces, length * heads, d, **wide)
        extremes = torch.empty(rows, pieces, length * heads, 2, **wide)
    stored = k.flatten(-2), v.flatten(-2), prefixes.keys, prefixes.values
    matrices = zip(_MATRICES, (*stored, questions.keys, questions.values), strict=True)
    descriptors: dict[str, Any] = {name: held_matrix(x, tile["KEYS"], d) for name, x in matrices}
    first = prefixes.first.contiguous()
    rows_of: dict[str, Any] = {
        "slots": prefixes.slots.contiguous(),
        "first": first,
        "starts": questions.starts.contiguous(),
        "counts": questions.counts.contiguous(),
    }
    numbers: dict[str, Any] = {
        "length": length,
        "size": size,
        "places": questions.keys.shape[1],
        "tokens": rows * length,
        "stored": cached[..., 0].numel(),
        "beside": questions.keys[..., 0].numel(),
        "window": EVERYTHING if prefixes.window is None else prefixes.window,
    }
    floats: dict[str, Any] = {"q": q, "out": out, "partial": partial, "extremes": extremes}
    constants: dict[str, Any] = {"HEADS": heads, "KV_HEADS": kv_heads, "D": d}
    constants["CACHE"] = cache_of(cached)
    launch(
        kernel,
        (triton.cdiv(length * (heads // kv_heads), tile["ROWS"]), kv_heads * pieces, rows),
        tile,
        q.device,
        **floats,
        **descriptors,
        **rows_of,
        **numbers,
        **constants,
        WINDOWED=prefixes.window is not None,
    )
    if pieces > 1:
        merge_pieces(partial, extremes, first, out, size, tile["SPLIT"])
    return out


def _serves(q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, questions: Questions) -> bool:
    d = q.shape[-1]
    held = prefixes.keys, prefixes.values, questions.keys, questions.values
    stored = all(x.is_contiguous() and x[..., 0].numel() < 2**31 for x in held)
    rows = prefixes.slots, prefixes.first, questions.starts, questions.counts
    numbers = all(x.dtype == torch.int64 for x in rows)
    shaped = 16 <= d <= 512 and d & (d - 1) == 0
    return shaped and stored and numbers and attended((q, k, v), held)


def _check(device: torch.device, kind: torch.dtype | None = None) -> None:
    """Narrow heads, and those of the 26B-A4B over prefixes of two pieces, in a cache of this
    kind."""
    wide = [
        (heads, kv_heads, d, tile_for(read_kernel(d), device)["SPLIT"] + 404, window)
        for heads, kv_heads, d, window in ((16, 8, 256, 300), (16, 2, 512, None))
    ]
    for sizes in sizes_for(device, [(4, 2, 64, 150, 140)], wide):
        _check_heads(*sizes, device, kind)


def _check_heads(
    heads: int,
    kv_heads: int,
    d: int,
    size: int,
    window: int | None,
    device: torch.device,
    cached: torch.dtype | None,
) -> None:
    """Rows with and without a prefix and a question, beside what earlier requests left: NaN."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    n, places, before = 24, 200, size - 20
    q, k, v, keys, values, own_keys, own_values = random_like(
        *(device, dtype, (4, n, heads, d), (4, n, kv_heads, d), (4, n, kv_heads, d)),
        *((3, kv_heads, size, d), (3, kv_heads, size, d)),
        *((kv_heads, places, d), (kv_heads, places, d)),
    )
    slots, first, starts, counts = (
        torch.tensor(numbers, device=device)
        for numbers in ([2, 0, 1, 2], [before, 0, size, before], [5, 60, 7, 7], [45, 130, 0, 20])
    )
    q = q * d**-0.5
    for stored in (keys, values):
        stored[2, :, before:] = stored[0] = float("nan")
    for beside in (own_keys, own_values):
        beside[:, :5] = beside[:, 50:60] = beside[:, 190:] = float("nan")

    held = [stored_as(x, cached or dtype) for x in (keys, values, own_keys, own_values)]

    def call(kind: torch.dtype, held: list[Tensor]) -> tuple[Any, ...]:
        prefixes = Prefixes(held[0], held[1], slots, first, window)
        questions = Questions(held[2], held[3], starts, counts, 130)
        return q.to(kind), k.to(kind), v.to(kind), prefixes, questions

    wide = [x.double() for x in widened(held, dtype)]
    expected = attention_reference.read_attention.reference(*call(torch.float64, wide))
    assert_close(read_attention(*call(dtype, held)), expected, 2 * error_bound(dtype))


TWINS = {
    name: KernelTwin(name, read_attention, _serves, check)
    for name, check in checks_of("read_attention", _check).items()
}
