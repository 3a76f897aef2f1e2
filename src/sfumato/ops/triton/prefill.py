"""Attention of a prompt's tokens: one row, causal, over what its slot holds and over itself.

The keys are copied into one tensor, as the reference copies them: of 4,096 tokens after a prefix of
32,768 the copies of a layer move 0.2 GB, and its products take a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import NOWHERE, Causal
from sfumato.ops.narrow_cache import is_narrow, widened
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import EVERYTHING, matrix, multiplied
from sfumato.ops.triton.prefill_kernels import attend_causally
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    error_bound,
    random_like,
    sizes_for,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.workspaces import NARROW

MOST = 2**31  # elements that 32 bits count

_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16:16"),
    **dict.fromkeys(("keys", "values"), "tensordesc<bf16[{KEYS}, {D}]>"),
    **dict.fromkeys(("queries", "positions"), "*i64"),
    **dict.fromkeys(("tokens", "window"), "i32"),
    **dict.fromkeys(("length", "stored"), "i32:16"),
}

SLIDING = register(
    Kernel("prefill_256", attend_causally, _TYPES, {"HEADS": 16, "KV_HEADS": 8, "D": 256})
)
FULL = register(
    Kernel("prefill_512", attend_causally, _TYPES, {"HEADS": 16, "KV_HEADS": 2, "D": 512})
)


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """See `ops.attend`; floats are bfloat16, and positions below 2³¹ - 1. A token that sees no key
    gets zeros."""
    assert causal is not None
    q = q.contiguous()
    tokens, heads, d = q.shape
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    kernel = SLIDING if d <= NARROW else FULL
    tile = tile_for(kernel.name, q.device)
    padding = -sum(part.shape[1] for part in keys) % tile["KEYS"]
    positions = torch.cat((causal.keys, causal.keys.new_full((padding,), NOWHERE)))
    k, v = (_joined(widened(parts, q.dtype), padding) for parts in (keys, values))
    kv_heads, length = k.shape[:2]
    sizes: dict[str, Any] = {"HEADS": heads, "KV_HEADS": kv_heads, "D": d}
    launch(
        kernel,
        (triton.cdiv(tokens * (heads // kv_heads), tile["ROWS"]), kv_heads),
        tile,
        q.device,
        q=q,
        keys=matrix(k, tile["KEYS"], d),
        values=matrix(v, tile["KEYS"], d),
        queries=causal.queries.contiguous(),
        positions=positions,
        out=out,
        tokens=tokens,
        length=length,
        stored=kv_heads * length,
        window=EVERYTHING if causal.window is None else causal.window,
        **sizes,
    )
    return out


def _joined(parts: Sequence[Tensor], padding: int) -> Tensor:
    """Keys or values in parts [kv_heads, n, d] as one tensor, with so many zeros after them."""
    kv_heads, _, d = parts[0].shape
    zeros = parts[0].new_zeros(1, 1, 1).expand(kv_heads, padding, d)
    return torch.cat((*parts, zeros), dim=1)


def _serves(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> bool:
    d = q.shape[-1]
    shaped = 16 <= d <= 512 and d & (d - 1) == 0
    most = max(q.numel(), sum(part.numel() for part in keys))
    wide = [part for part in (*keys, *values) if not is_narrow(part.dtype)]
    return causal is not None and shaped and most < MOST and multiplied(q, *wide)


def _check(device: torch.device) -> None:
    """Narrow heads, and those of the 26B-A4B."""
    for heads, kv_heads, d in sizes_for(device, [(4, 2, 64)], [(16, 8, 256), (16, 2, 512)]):
        _check_heads(heads, kv_heads, d, device)


def _check_heads(heads: int, kv_heads: int, d: int, device: torch.device) -> None:
    """A ring that has turned, behind zeros at no position, and tokens that fill no tile."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    n, held = 40, 90
    shapes = (n, heads, d), *[(kv_heads, count, d) for count in (held, held, n, n)]
    q, old_k, old_v, k, v = random_like(device, dtype, *shapes)
    q = q * d**-0.5
    zeros = torch.zeros(kv_heads, 7, d, dtype=dtype, device=device)
    queries = torch.arange(100 + held, 100 + held + n, device=device)
    unseen = torch.full((7,), NOWHERE, device=device)
    positions = torch.cat((unseen, torch.arange(100, 100 + held, device=device), queries))
    causal = Causal(queries, positions, 60)
    out = attend(q, (zeros, old_k, k), (zeros, old_v, v), causal)
    wide = [x.double() for x in (q, zeros, old_k, old_v, k, v)]
    q, zeros, old_k, old_v, k, v = wide
    expected = attention_reference.attend.reference(q, (zeros, old_k, k), (zeros, old_v, v), causal)
    assert_close(out, expected, 2 * error_bound(dtype))


TWINS = {"attend": KernelTwin("attend", attend, _serves, _check)}
