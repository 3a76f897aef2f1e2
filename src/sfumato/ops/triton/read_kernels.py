"""The kernel of `read_attention`: canvases that see a slot's prefix and a question beside it.

Tiles, the state of the softmax and the pieces of a long prefix are those of `attention_kernels`.
The keys of a question, which are few, go with the canvas into the first piece, so that a read has
as many pieces as its slot's prefix and no sum depends on where the question stands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfumato.ops.triton.attention_kernels import add_span, empty_state
from sfumato.ops.triton.narrow_cache import as_held
from sfumato.ops.triton.weights import as_descriptor


@triton.jit(
    do_not_specialize=[
        "slots", "first", "starts", "counts", "length", "size", "places", "tokens", "stored",
        "beside", "window",
    ]
)  # fmt: skip
def attend_read(
    q: tl.tensor, new_keys: tl.tensor, new_values: tl.tensor, keys: tl.tensor, values: tl.tensor,
    own_keys: tl.tensor, own_values: tl.tensor, slots: tl.tensor, first: tl.tensor,
    starts: tl.tensor, counts: tl.tensor, out: tl.tensor, partial: tl.tensor, extremes: tl.tensor,
    length: tl.tensor, size: tl.tensor, places: tl.tensor, tokens: tl.tensor, stored: tl.tensor,
    beside: tl.tensor, window: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOWED: tl.constexpr,
    CACHE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of ROWS, one key head and one piece of the prefix of one row of the batch; the grid,
    the pieces, and what stands where no merge follows are those of `attention_kernels.attend`.

    q and out [rows, length, HEADS, D]; new_keys and new_values those of the canvases as matrices
    [tokens, KV_HEADS · D], tokens being rows · length; keys and values those of the slots, [stored,
    D], stored being slots · KV_HEADS · size; own_keys and own_values those of the questions,
    [beside, D], beside being KV_HEADS · places, both as CACHE says. WINDOWED: of what comes before
    a canvas it sees the last `window - 1` positions.
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

    lowest = tl.full((ROWS,), -(2**30), tl.int32)
    highest = tl.full((ROWS,), 2**30, tl.int32)
    new_keys = as_descriptor(new_keys, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    new_values = as_descriptor(new_values, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    end = tl.where(piece == 0, length, 0)
    largest, total, weighted = add_span(
        query, new_keys, new_values, row * length, head * D, tokens, 0, end, 0, 2**30, 0,
        lowest, highest, largest, total, weighted, False, KEYS, 0, UPCAST,
    )  # fmt: skip

    # Positions of the question count from `before`, which is where it begins.
    count = tl.load(counts + row).to(tl.int32)
    if WINDOWED:
        lowest += 2**30 + count - window
    own_keys = as_held(own_keys, beside, D, KEYS, D, CACHE, DESCRIPTORS)
    own_values = as_held(own_values, beside, D, KEYS, D, CACHE, DESCRIPTORS)
    line = head * places + tl.load(starts + row).to(tl.int32)
    end = tl.where(piece == 0, count, 0)
    largest, total, weighted = add_span(
        query, own_keys, own_values, line, 0, beside, 0, end, 0, 2**30, 0,
        lowest, highest, largest, total, weighted, WINDOWED, KEYS, CACHE, UPCAST,
    )  # fmt: skip

    # Those of the prefix count from its own beginning.
    lowest = tl.maximum(lowest + before, -1)
    turn = before % size
    line = ((tl.load(slots + row) * KV_HEADS + head) * size + start).to(tl.int32)
    keys = as_held(keys, stored, D, KEYS, D, CACHE, DESCRIPTORS)
    values = as_held(values, stored, D, KEYS, D, CACHE, DESCRIPTORS)
    end = tl.minimum(held, start + SPLIT)
    largest, total, weighted = add_span(
        query, keys, values, line, 0, stored, start, end, before - turn, turn, size,
        lowest, highest, largest, total, weighted, WINDOWED, KEYS, CACHE, UPCAST,
    )  # fmt: skip

    if held <= SPLIT:
        result = weighted / total[:, None]  # a canvas sees itself
        tl.store(out + row_at + cells, result, mask=inside[:, None])
    else:
        piece_at = (row.to(tl.int64) * pieces + piece) * length * HEADS
        tl.store(partial + piece_at * D + cells, weighted, mask=inside[:, None])
        tl.store(extremes + (piece_at + cell) * 2, largest, mask=inside)
        tl.store(extremes + (piece_at + cell) * 2 + 1, total, mask=inside)
