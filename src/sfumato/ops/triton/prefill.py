"""Attention of a prompt's tokens: one row, causal, over what its slot holds and over itself.

The keys are copied into one tensor, as the reference copies them: of 4,096 tokens after a prefix of
32,768 the copies of a layer move 0.2 GB, and its products take a hundred times as long.  Rows of a
tile and the state of the softmax are those of `attention`.  Blocks of keys begin at multiples of
KEYS: a token's sums are the same whatever tokens stand beside it in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import NOWHERE, Causal, Own
from sfumato.ops.triton.attention import add_keys, empty_state
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import EVERYTHING, matrix, multiplied
from sfumato.ops.triton.self_test import (
    KernelTwin,
    compare,
    error_bound,
    random_like,
    sizes_for,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import as_descriptor
from sfumato.ops.triton.workspaces import NARROW

SCANNED = tl.constexpr(2048)  # positions at a time, in the search for the keys that a tile sees


@triton.jit
def _seen_range(
    positions: tl.tensor, length: tl.tensor, above: tl.tensor, most: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the keys whose position lies above `above` and not above `most` begin, down to a
    multiple of KEYS, and where they end. Of none, the end is 0."""
    offsets = tl.arange(0, SCANNED)
    begins = tl.full((SCANNED,), 2**30, tl.int32)
    ends = tl.zeros((SCANNED,), tl.int32)
    for at in range(0, length, SCANNED):
        index = at + offsets
        position = tl.load(positions + index, mask=index < length, other=2**31 - 1).to(tl.int32)
        seen = (position > above) & (position <= most)
        begins = tl.minimum(begins, tl.where(seen, index, 2**30))
        ends = tl.maximum(ends, tl.where(seen, index + 1, 0))
    return tl.min(begins) // KEYS * KEYS, tl.max(ends)


@triton.jit(do_not_specialize=["queries", "positions", "tokens", "window"])
def _attend_causally(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, queries: tl.tensor, positions: tl.tensor,
    out: tl.tensor, tokens: tl.tensor, length: tl.tensor, stored: tl.tensor, window: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of ROWS of one key head.  Grid: (⌈tokens · GROUP / ROWS⌉, KV_HEADS).

    q and out [tokens, HEADS, D]; keys and values [stored, D], stored being KV_HEADS · length, and
    length a multiple of KEYS; queries int64 [tokens] and positions int64 [length], which no token
    sees where they are 2³¹ - 1. A token sees the `window` positions up to its own.

    Blocks that no row of the tile sees are left out at both ends, and would have changed no bit.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(1)
    # The last tokens see the most keys: programs that begin late have little to do.
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    token = pair // GROUP
    inside = token < tokens
    own = tl.load(queries + token, mask=inside, other=-1).to(tl.int32)
    newest = tl.max(own)
    lowest = own - window
    begin, end = _seen_range(
        positions, length, tl.min(tl.where(inside, lowest, newest)), newest, KEYS
    )
    columns = tl.arange(0, D)
    cells = (token * HEADS + head * GROUP + pair % GROUP)[:, None] * D + columns[None, :]
    query = tl.load(q + cells, mask=inside[:, None], other=0.0)
    largest, total, weighted = empty_state(ROWS, D)
    keys = as_descriptor(keys, stored, D, KEYS, D, DESCRIPTORS)
    values = as_descriptor(values, stored, D, KEYS, D, DESCRIPTORS)
    offsets = tl.arange(0, KEYS)
    line = head * length
    for at in range(begin, end, KEYS):
        position = tl.load(positions + at + offsets).to(tl.int32)[None, :]
        seen = (position > lowest[:, None]) & (position <= own[:, None])
        largest, total, weighted = add_keys(
            query, keys.load([line + at, 0]), values.load([line + at, 0]), seen,
            largest, total, weighted, True, UPCAST,
        )  # fmt: skip
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + cells, result, mask=inside[:, None])


MOST = 2**31  # elements that 32 bits count

_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16:16"),
    **dict.fromkeys(("keys", "values"), "tensordesc<bf16[{KEYS}, {D}]>"),
    **dict.fromkeys(("queries", "positions"), "*i64"),
    **dict.fromkeys(("tokens", "window"), "i32"),
    **dict.fromkeys(("length", "stored"), "i32:16"),
}

SLIDING = register(
    Kernel("prefill_256", _attend_causally, _TYPES, {"HEADS": 16, "KV_HEADS": 8, "D": 256})
)
FULL = register(
    Kernel("prefill_512", _attend_causally, _TYPES, {"HEADS": 16, "KV_HEADS": 2, "D": 512})
)


def attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> Tensor:
    """See `ops.attend`; floats are bfloat16, and positions below 2³¹ - 1. A token that sees no key
    gets zeros. Rows that follow a prefix are served one by one."""
    if own:
        return attention_reference.attend.reference(q, keys, values, causal, own)
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
    zeros = keys[0].new_zeros(1, 1, 1).expand(len(keys[0]), padding, d)
    k, v = (torch.cat((*parts, zeros), dim=1) for parts in (keys, values))
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


def _serves(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> bool:
    d = q.shape[-1]
    shaped = 16 <= d <= 512 and d & (d - 1) == 0
    most = max(q.numel(), sum(part.numel() for part in keys))
    return causal is not None and shaped and most < MOST and multiplied(q, *keys, *values)


def _check(device: torch.device) -> None:
    """Narrow heads, and those of the 26B-A4B."""
    for heads, kv_heads, d in sizes_for(device, [(4, 2, 64)], [(16, 8, 256), (16, 2, 512)]):
        _check_heads(heads, kv_heads, d, device)


def _check_heads(heads: int, kv_heads: int, d: int, device: torch.device) -> None:
    """A ring that has turned, behind zeros at no position, and tokens that fill no tile."""
    n, held = 40, 90
    shapes = (n, heads, d), *[(kv_heads, count, d) for count in (held, held, n, n)]
    q, old_k, old_v, k, v = random_like(device, *shapes)
    zeros = torch.zeros(kv_heads, 7, d, dtype=q.dtype, device=device)
    queries = torch.arange(100 + held, 100 + held + n, device=device)
    unseen = torch.full((7,), NOWHERE, device=device)
    positions = torch.cat((unseen, torch.arange(100, 100 + held, device=device), queries))
    given = q * d**-0.5, (zeros, old_k, k), (zeros, old_v, v), Causal(queries, positions, 60)
    compare(attend, attention_reference.attend.reference, given, 2 * error_bound(q.dtype))


TWINS = {"attend": KernelTwin("attend", attend, _serves, _check)}
