"""The kernels of `attention`: one over pieces of the keys, one that merges the pieces.

Rows of a tile are pairs of a position and a query head that share one key head: `GROUP` heads of a
position, then the next position.  Softmax is in powers of two and float32; the weights of the
values are rounded to the dtype of the values, as all flash kernels round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfumato.ops.triton.narrow_cache import as_held, held_block
from sfumato.ops.triton.weights import as_descriptor, product

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def empty_state(ROWS: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """The largest score of each row so far, the sum of powers, and the sum of weighted values."""
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    return largest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@triton.jit
def add_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """The state with a block of keys more: q [ROWS, D], k and v [KEYS, D], seen [ROWS, KEYS]."""
    scores = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    scores = product(q, k.T, scores, UPCAST) * _LOG2E
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    # Of a row that has seen no key yet the largest score is -inf, and -inf - -inf is NaN.
    finite = tl.where(new == float("-inf"), 0.0, new)
    powers = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(largest - finite)
    total = total * shrink + tl.sum(powers, 1)
    return new, total, product(powers.to(v.dtype), v, values * shrink[:, None], UPCAST)


@triton.jit
def _add_tail(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    real: tl.tensor,
    seen: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """The state with a block more of which the keys `real` [KEYS] exist. The others may be what an
    earlier request left, or another row's, even NaN: 0 · NaN is NaN, so their values become 0."""
    v = tl.where(real[:, None], v, 0.0)
    return add_keys(q, k, v, seen & real[None, :], largest, total, values, True, UPCAST)


@triton.jit
def _seen(
    index: tl.tensor,
    shift: tl.tensor,
    turn: tl.tensor,
    size: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
) -> tl.tensor:
    """Which rows see the keys at these places, [ROWS, keys]: those whose position lies after
    `lowest` and not after `highest`, both [ROWS].

    In a ring, place i holds the last position before its length with position mod size = i: that
    is i + shift, and one size less from the place `turn` on.
    """
    position = index + shift - tl.where(index >= turn, size, 0)
    return (position[None, :] > lowest[:, None]) & (position[None, :] <= highest[:, None])


@triton.jit
def add_span(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, line: tl.tensor, column: tl.tensor,
    lines: tl.tensor, begin: tl.tensor, end: tl.tensor, shift: tl.tensor, turn: tl.tensor,
    size: tl.tensor, lowest: tl.tensor, highest: tl.tensor, largest: tl.tensor, total: tl.tensor,
    weighted: tl.tensor, MASKED: tl.constexpr, KEYS: tl.constexpr, CACHE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The state with the keys at the places `begin` up to `end` more, which stand in the matrices
    of so many `lines` from `line` and `column` on; the others as in `_seen`."""
    D: tl.constexpr = q.shape[1]
    offsets = tl.arange(0, KEYS)
    whole_end = begin + tl.maximum(end - begin, 0) // KEYS * KEYS
    for at in range(0, whole_end - begin, KEYS):
        seen = _seen(begin + at + offsets, shift, turn, size, lowest, highest)
        block_k = held_block(keys, line + at, column, lines, KEYS, D, CACHE, q.dtype)
        block_v = held_block(values, line + at, column, lines, KEYS, D, CACHE, q.dtype)
        largest, total, weighted = add_keys(
            q, block_k, block_v, seen, largest, total, weighted, MASKED, UPCAST
        )
    if whole_end < end:
        index = whole_end + offsets
        seen = _seen(index, shift, turn, size, lowest, highest)
        line = line + (whole_end - begin)
        block_k = held_block(keys, line, column, lines, KEYS, D, CACHE, q.dtype)
        block_v = held_block(values, line, column, lines, KEYS, D, CACHE, q.dtype)
        largest, total, weighted = _add_tail(
            q, block_k, block_v, index < end, seen, largest, total, weighted, UPCAST
        )
    return largest, total, weighted


@triton.jit(
    do_not_specialize=[
        "slots", "first", "width", "commits", "length", "size", "tokens", "stored", "window"
    ]
)  # fmt: skip
def attend(
    q: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    commits: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    extremes: tl.tensor,
    length: tl.tensor,
    size: tl.tensor,
    tokens: tl.tensor,
    stored: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PHASES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CACHE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """One tile of ROWS, one key head and one piece of the prefix of one row of the batch.

    Grid: (⌈length · GROUP / ROWS⌉, KV_HEADS · pieces, rows), where pieces is ⌈size / SPLIT⌉; the
    first piece takes the row's own canvas too. Pieces have a fixed length, and those beyond what
    the slot holds leave early, so that no sum depends on other rows or on the pool's size. A row
    with one piece stores its result, one with several what `merge` makes it of.

    new_keys and new_values are those of the canvases as matrices [tokens, KV_HEADS · D], tokens
    being rows · length; keys and values those of the slots, [stored, D], stored being slots ·
    KV_HEADS · size, as CACHE says (see `narrow_cache`). Without PHASES all rows denoise, and
    `commits` is not read; WINDOWED: rows that commit see at most `window` positions.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, head = tl.program_id(2), tl.program_id(1) % KV_HEADS
    piece, pieces = tl.program_id(1) // KV_HEADS, tl.num_programs(1) // KV_HEADS
    before = tl.load(first + row).to(tl.int32)
    held = tl.minimum(before, size)
    start = piece * SPLIT
    if (piece > 0) & (start >= held):
        return
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = pair // GROUP
    inside = position < length
    columns = tl.arange(0, D)
    # Of the row, and so that offsets from its first element fit 32 bits.
    cell = position * HEADS + head * GROUP + pair % GROUP
    row_at = row.to(tl.int64) * length * (HEADS * D)
    cells = cell[:, None] * D + columns[None, :]
    query = tl.load(q + row_at + cells, mask=inside[:, None], other=0.0)
    largest, total, weighted = empty_state(ROWS, D)

    # Positions after the width see what the last one of the width sees.
    own = tl.load(width + row).to(tl.int32)
    place = tl.minimum(position, own - 1)
    lowest = tl.full((ROWS,), -(2**30), tl.int32)
    highest = tl.full((ROWS,), 2**30, tl.int32)
    if PHASES:
        causal = tl.load(commits + row) > 0
        highest = tl.where(causal, place, highest)
        if WINDOWED:
            lowest = tl.where(causal, place - window, lowest)
    canvas_end = tl.where(piece == 0, own, 0)
    new_keys = as_descriptor(new_keys, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    new_values = as_descriptor(new_values, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    largest, total, weighted = add_span(
        query, new_keys, new_values, row * length, head * D, tokens, 0, canvas_end, 0, 2**30, 0,
        lowest, highest, largest, total, weighted, PHASES, KEYS, 0, UPCAST,
    )  # fmt: skip

    # Positions of the prefix count from its beginning, and those of the canvas from `before`.
    lowest = tl.maximum(lowest + before, -1)
    highest += 2**29
    turn = before % size
    begin = (tl.load(slots + row) * KV_HEADS + head) * size
    end = tl.minimum(held, start + SPLIT)
    keys = as_held(keys, stored, D, KEYS, D, CACHE, DESCRIPTORS)
    values = as_held(values, stored, D, KEYS, D, CACHE, DESCRIPTORS)
    line = (begin + start).to(tl.int32)
    largest, total, weighted = add_span(
        query, keys, values, line, 0, stored, start, end, before - turn, turn, size,
        lowest, highest, largest, total, weighted, WINDOWED, KEYS, CACHE, UPCAST,
    )  # fmt: skip

    if held <= SPLIT:
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row_at + cells, result, mask=inside[:, None])
    else:
        piece_at = (row.to(tl.int64) * pieces + piece) * length * HEADS
        tl.store(partial + piece_at * D + cells, weighted, mask=inside[:, None])
        tl.store(extremes + (piece_at + cell) * 2, largest, mask=inside)
        tl.store(extremes + (piece_at + cell) * 2 + 1, total, mask=inside)


@triton.jit(do_not_specialize=["first", "pairs", "size", "pieces"])
def merge(
    partial: tl.tensor,
    extremes: tl.tensor,
    first: tl.tensor,
    out: tl.tensor,
    pairs: tl.tensor,
    size: tl.tensor,
    pieces: tl.tensor,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """out [rows, pairs, D] of `partial` float32 [rows, pieces, pairs, D] and `extremes` float32
    [rows, pieces, pairs, 2], of which the pieces that a row has are written; grid (⌈pairs / PAIRS⌉,
    rows). A pair is a position and a head. Pieces are added from the first to the last.
    """
    row = tl.program_id(1)
    held = tl.minimum(tl.load(first + row).to(tl.int32), size)
    if held <= SPLIT:
        return
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    columns = tl.arange(0, D)
    largest, total, weighted = empty_state(PAIRS, D)
    for piece in range((held + SPLIT - 1) // SPLIT):
        at = (row.to(tl.int64) * pieces + piece) * pairs + pair
        its_largest = tl.load(extremes + at * 2, mask=inside, other=float("-inf"))
        its_total = tl.load(extremes + at * 2 + 1, mask=inside, other=0.0)
        source = partial + at[:, None] * D + columns[None, :]
        its_values = tl.load(source, mask=inside[:, None], other=0.0)
        new = tl.maximum(largest, its_largest)
        finite = tl.where(new == float("-inf"), 0.0, new)
        shrink, grow = tl.exp2(largest - finite), tl.exp2(its_largest - finite)
        total = total * shrink + its_total * grow
        weighted = weighted * shrink[:, None] + its_values * grow[:, None]
        largest = new
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (row.to(tl.int64) * pairs + pair)[:, None] * D + columns[None, :]
    tl.store(target, result, mask=inside[:, None])
