"""The kernel of `attend`: tokens of a prompt over keys of which each has a position.

Rows of a tile and the state of the softmax are those of `attention_kernels`.  Keys come one after
another as the caller joined them, and blocks of them begin at multiples of KEYS: a token's sums are
the same whatever tokens stand beside it in a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfumato.ops.triton.attention_kernels import add_keys, empty_state
from sfumato.ops.triton.weights import as_descriptor

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
def attend_causally(
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
