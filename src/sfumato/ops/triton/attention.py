"""Attention over segments of keys: of padded rows, all in one launch, and of a prompt's tokens.

`_attend` serves rows that denoise, rows that denoise beside rows that commit, which see causally,
and canvases that follow questions.  Lengths, slots, places and phases are read on the device, so
that a captured graph serves whatever they become.

`_attend_causally` serves one packed row over what its slot holds and over itself.  The keys are
copied into one tensor, as the reference copies them: of 4,096 tokens after a prefix of 32,768 the
copies of a layer move 0.2 GB, and its products take a hundred times as long.  Blocks of keys begin
at multiples of KEYS: a token's sums are the same whatever tokens stand beside it in a chunk.

Rows of a tile are pairs of a position and a query head that share one key head: `GROUP` heads of a
position, then the next position.  Softmax is in powers of two and float32; the weights of the
values are rounded to the dtype of the values, as all flash kernels round them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import NOWHERE, Causal, Own, Questions, Rows
from sfumato.ops.device_check import tensors_of
from sfumato.ops.triton.kernel import Kernel, interpreting, launch, register
from sfumato.ops.triton.operands import EVERYTHING, matrix, multiplied
from sfumato.ops.triton.self_test import KernelTwin, Trial, compare
from sfumato.ops.triton.tiles import Tile, tile_for
from sfumato.ops.triton.weights import as_descriptor, product
from sfumato.ops.triton.workspaces import NARROW, kernel_of, most_pieces

_MOST = 2**31  # numbers that 32 bits count
_LOG2E = tl.constexpr(1.4426950408889634)
SCANNED = tl.constexpr(2048)  # positions at a time, in the search for the keys that a tile sees


@triton.jit
def _empty_state(ROWS: tl.constexpr, D: tl.constexpr) -> tl.tensor:
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
def _add_keys(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, line: tl.tensor, column: tl.tensor,
    begin: tl.tensor, end: tl.tensor, shift: tl.tensor, turn: tl.tensor, size: tl.tensor,
    lowest: tl.tensor, highest: tl.tensor, largest: tl.tensor, total: tl.tensor,
    weighted: tl.tensor, MASKED: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The state with the keys at the places `begin` up to `end` more, which stand in the matrices
    from `line` and `column` on; the others as in `_seen`."""
    offsets = tl.arange(0, KEYS)
    whole_end = begin + tl.maximum(end - begin, 0) // KEYS * KEYS
    for at in range(0, whole_end - begin, KEYS):
        seen = _seen(begin + at + offsets, shift, turn, size, lowest, highest)
        block_k, block_v = keys.load([line + at, column]), values.load([line + at, column])
        largest, total, weighted = add_keys(
            q, block_k, block_v, seen, largest, total, weighted, MASKED, UPCAST
        )
    if whole_end < end:
        index = whole_end + offsets
        seen = _seen(index, shift, turn, size, lowest, highest)
        line = line + (whole_end - begin)
        largest, total, weighted = _add_tail(
            q, keys.load([line, column]), values.load([line, column]), index < end, seen,
            largest, total, weighted, UPCAST,
        )  # fmt: skip
    return largest, total, weighted


@triton.jit
def _piece_length(held: tl.tensor, most: tl.tensor, shortest: tl.tensor) -> tl.tensor:
    """The positions of each piece of a prefix of `held`, of which there are `most` at most, and
    whose last piece may be shorter: a multiple of 64, which KEYS divides."""
    return tl.maximum((held + 64 * most - 1) // (64 * most) * 64, shortest)


@triton.jit(
    do_not_specialize=[
        "slots", "first", "width", "commits", "starts", "counts", "length", "size", "tokens",
        "stored", "places", "beside", "window",
    ]
)  # fmt: skip
def _attend(
    q: tl.tensor, new_keys: tl.tensor, new_values: tl.tensor, keys: tl.tensor, values: tl.tensor,
    own_keys: tl.tensor, own_values: tl.tensor, slots: tl.tensor, first: tl.tensor,
    width: tl.tensor, commits: tl.tensor, starts: tl.tensor, counts: tl.tensor, out: tl.tensor,
    partial: tl.tensor, extremes: tl.tensor, length: tl.tensor, size: tl.tensor, tokens: tl.tensor,
    stored: tl.tensor, places: tl.tensor, beside: tl.tensor, window: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PHASES: tl.constexpr,
    WINDOWED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
    SHORTEST: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of ROWS, one key head and one piece of the prefix of one row of the batch.

    Grid: (⌈length · GROUP / ROWS⌉, KV_HEADS · pieces, rows), where pieces are as many as the
    longest prefix that a slot can hold has; the first piece takes the row's own canvas too, and the
    keys of its question, which are few. The length of a piece follows from the row's prefix alone,
    and programs without a piece leave early, so that no sum depends on other rows, on the pool's
    size or on where a question stands. A row with one piece stores its result, one with several
    what `_merge` makes it of.

    q and out [rows, length, HEADS, D]; new_keys and new_values are those of the canvases as
    matrices [tokens, KV_HEADS · D], tokens being rows · length; keys and values those of the slots,
    [stored, D], stored being slots · KV_HEADS · size; own_keys and own_values those of the
    questions, [beside, D], beside being KV_HEADS · places. Without questions their parameters are
    None, and with them `width` and `commits`: a canvas has the whole length. Without PHASES all
    rows denoise, and `commits` is not read. WINDOWED: rows that commit see at most `window`
    positions, and of what comes before a canvas with a question the canvas sees the last `window -
    1`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, head = tl.program_id(2), tl.program_id(1) % KV_HEADS
    piece, pieces = tl.program_id(1) // KV_HEADS, tl.num_programs(1) // KV_HEADS
    before = tl.load(first + row).to(tl.int32)
    held = tl.minimum(before, size)
    extent = _piece_length(held, PIECES, SHORTEST)
    start = piece * extent
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
    largest, total, weighted = _empty_state(ROWS, D)

    own = length if width is None else tl.load(width + row).to(tl.int32)
    lowest = tl.full((ROWS,), -(2**30), tl.int32)
    highest = tl.full((ROWS,), 2**30, tl.int32)
    if PHASES:
        # Positions after the width see what the last one of the width sees.
        place = tl.minimum(position, own - 1)
        causal = tl.load(commits + row) > 0
        highest = tl.where(causal, place, highest)
        if WINDOWED:
            lowest = tl.where(causal, place - window, lowest)
    canvas_end = tl.where(piece == 0, own, 0)
    new_keys = as_descriptor(new_keys, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    new_values = as_descriptor(new_values, tokens, KV_HEADS * D, KEYS, D, DESCRIPTORS)
    largest, total, weighted = _add_keys(
        query, new_keys, new_values, row * length, head * D, 0, canvas_end, 0, 2**30, 0,
        lowest, highest, largest, total, weighted, PHASES, KEYS, UPCAST,
    )  # fmt: skip

    if counts is not None:
        # Positions of the question count from `before`, which is where it begins.
        count = tl.load(counts + row).to(tl.int32)
        if WINDOWED:
            lowest += 2**30 + count - window
        own_keys = as_descriptor(own_keys, beside, D, KEYS, D, DESCRIPTORS)
        own_values = as_descriptor(own_values, beside, D, KEYS, D, DESCRIPTORS)
        line = head * places + tl.load(starts + row).to(tl.int32)
        largest, total, weighted = _add_keys(
            query, own_keys, own_values, line, 0, 0, tl.where(piece == 0, count, 0), 0, 2**30, 0,
            lowest, highest, largest, total, weighted, WINDOWED, KEYS, UPCAST,
        )  # fmt: skip

    # Positions of the prefix count from its beginning, and those of the canvas from `before`.
    lowest = tl.maximum(lowest + before, -1)
    highest += 2**29
    turn = before % size
    begin = (tl.load(slots + row) * KV_HEADS + head) * size
    keys = as_descriptor(keys, stored, D, KEYS, D, DESCRIPTORS)
    values = as_descriptor(values, stored, D, KEYS, D, DESCRIPTORS)
    largest, total, weighted = _add_keys(
        query, keys, values, (begin + start).to(tl.int32), 0, start,
        tl.minimum(held, start + extent), before - turn, turn, size,
        lowest, highest, largest, total, weighted, WINDOWED, KEYS, UPCAST,
    )  # fmt: skip

    if held <= extent:
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row_at + cells, result, mask=inside[:, None])
    else:
        piece_at = (row.to(tl.int64) * pieces + piece) * length * HEADS
        tl.store(partial + piece_at * D + cells, weighted, mask=inside[:, None])
        tl.store(extremes + (piece_at + cell) * 2, largest, mask=inside)
        tl.store(extremes + (piece_at + cell) * 2 + 1, total, mask=inside)


@triton.jit(do_not_specialize=["first", "pairs", "size", "pieces", "most", "shortest"])
def _merge(
    partial: tl.tensor,
    extremes: tl.tensor,
    first: tl.tensor,
    out: tl.tensor,
    pairs: tl.tensor,
    size: tl.tensor,
    pieces: tl.tensor,
    most: tl.tensor,
    shortest: tl.tensor,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """out [rows, pairs, D] of `partial` float32 [rows, pieces, pairs, D] and `extremes` float32
    [rows, pieces, pairs, 2], of which the pieces that a row has are written; grid (⌈pairs / PAIRS⌉,
    rows). A pair is a position and a head. Pieces are added from the first to the last; most and
    shortest: PIECES and SHORTEST of `_attend`.
    """
    row = tl.program_id(1)
    held = tl.minimum(tl.load(first + row).to(tl.int32), size)
    extent = _piece_length(held, most, shortest)
    if held <= extent:
        return
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    columns = tl.arange(0, D)
    largest, total, weighted = _empty_state(PAIRS, D)
    for piece in range((held + extent - 1) // extent):
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


@triton.jit
def _seen_range(
    positions: tl.tensor, length: tl.tensor, least: tl.tensor, most: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the keys whose position is `least` to `most` begin, down to a multiple of KEYS,
    and where they end. Of none, the end is 0."""
    offsets = tl.arange(0, SCANNED)
    begins = tl.full((SCANNED,), 2**30, tl.int32)
    ends = tl.zeros((SCANNED,), tl.int32)
    for at in range(0, length, SCANNED):
        index = at + offsets
        position = tl.load(positions + index, mask=index < length, other=2**31 - 1).to(tl.int32)
        seen = (position >= least) & (position <= most)
        begins = tl.minimum(begins, tl.where(seen, index, 2**30))
        ends = tl.maximum(ends, tl.where(seen, index + 1, 0))
    return tl.min(begins) // KEYS * KEYS, tl.max(ends)


@triton.jit(do_not_specialize=["first", "last", "positions", "tokens"])
def _attend_causally(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, first: tl.tensor, last: tl.tensor,
    positions: tl.tensor, out: tl.tensor, tokens: tl.tensor, length: tl.tensor, stored: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of ROWS of one key head.  Grid: (⌈tokens · GROUP / ROWS⌉, KV_HEADS).

    q and out [tokens, HEADS, D]; keys and values [stored, D], stored being KV_HEADS · length, and
    length a multiple of KEYS; positions int64 [length], which no token sees where they are 2³¹ - 1.
    A token sees the positions `first` to `last`, int64 [tokens].

    Blocks that no row of the tile sees are left out at both ends, and would have changed no bit.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(1)
    # The last tokens see the most keys: programs that begin late have little to do.
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    token = pair // GROUP
    inside = token < tokens
    lowest = tl.load(first + token, mask=inside, other=2**31 - 1).to(tl.int32)
    highest = tl.load(last + token, mask=inside, other=-1).to(tl.int32)
    begin, end = _seen_range(positions, length, tl.min(lowest), tl.max(highest), KEYS)
    columns = tl.arange(0, D)
    cells = (token * HEADS + head * GROUP + pair % GROUP)[:, None] * D + columns[None, :]
    query = tl.load(q + cells, mask=inside[:, None], other=0.0)
    largest, total, weighted = _empty_state(ROWS, D)
    keys = as_descriptor(keys, stored, D, KEYS, D, DESCRIPTORS)
    values = as_descriptor(values, stored, D, KEYS, D, DESCRIPTORS)
    offsets = tl.arange(0, KEYS)
    line = head * length
    for at in range(begin, end, KEYS):
        position = tl.load(positions + at + offsets).to(tl.int32)[None, :]
        seen = (position >= lowest[:, None]) & (position <= highest[:, None])
        largest, total, weighted = add_keys(
            query, keys.load([line + at, 0]), values.load([line + at, 0]), seen,
            largest, total, weighted, True, UPCAST,
        )  # fmt: skip
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + cells, result, mask=inside[:, None])


_QUESTIONS = ("own_keys", "own_values", "starts", "counts", "places", "beside")
_OF_ROWS = ("width", "commits")
_MATRICES = ("new_keys", "new_values", "keys", "values", "own_keys", "own_values")
_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16:16"),
    **dict.fromkeys(_MATRICES, "tensordesc<bf16[{KEYS}, {D}]>"),
    **dict.fromkeys(("slots", "first", "width", "commits", "starts", "counts"), "*i64"),
    **dict.fromkeys(("partial", "extremes"), "*fp32:16"),
    **dict.fromkeys(("length", "size", "tokens", "stored", "places", "beside", "window"), "i32"),
}
_DENOISE = {"denoise": {"PHASES": False, "WINDOWED": False}}  # the usual step: no row commits


def _kernels(name: str, absent: tuple[str, ...], phases: bool) -> tuple[Kernel, Kernel]:
    """The kernels of the sliding and of the full layers; absent: the parameters that are None."""
    types = {key: kind for key, kind in _TYPES.items() if key not in absent}
    both = {**dict.fromkeys(absent), "HEADS": 16, "PHASES": phases}
    sliding = {**both, "KV_HEADS": 8, "D": 256, "WINDOWED": True}
    full = {**both, "KV_HEADS": 2, "D": 512, "WINDOWED": False}
    variants = _DENOISE if phases else {}
    return (
        register(Kernel(f"{name}_256", _attend, types, sliding, variants)),
        register(Kernel(f"{name}_512", _attend, types, full, variants)),
    )


CANVASES = _kernels("attention", _QUESTIONS, True)
READS = _kernels("read", _OF_ROWS, False)
MERGE = register(
    Kernel(
        "attention_merge",
        _merge,
        {
            **dict.fromkeys(("partial", "extremes"), "*fp32:16"),
            "first": "*i64",
            "out": "*bf16:16",
            **dict.fromkeys(("pairs", "size", "pieces", "most", "shortest"), "i32"),
        },
        {"D": 512},
    )
)

_CAUSAL_TYPES = {
    **{name: _TYPES[name] for name in ("q", "out", "keys", "values", "tokens")},
    **dict.fromkeys(("first", "last", "positions"), "*i64"),
    **dict.fromkeys(("length", "stored"), "i32:16"),
}
PREFILL = tuple(
    register(Kernel(name, _attend_causally, _CAUSAL_TYPES, {"HEADS": 16, "KV_HEADS": n, "D": d}))
    for name, n, d in (("prefill_256", 8, 256), ("prefill_512", 2, 512))
)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """See `ops.attend_padded`; floats are bfloat16. Tokens after a width see what its last one
    sees. A width is at least 1, or the row's prefix has no positions."""
    count, length, heads, d = q.shape
    keys, questions, first = rows.keys, rows.questions, rows.first.contiguous()
    kv_heads, size = keys.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    kernel = (CANVASES if questions is None else READS)[d > NARROW]
    tile = tile_for(kernel.name, q.device)
    pieces = most_pieces(size, tile)
    # One piece stores its result at once; no program touches these, whose dtype decides the code.
    shape = (count, pieces, length * heads) if pieces > 1 else (0, 0, 0)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    partial, extremes = torch.empty(*shape, d, **wide), torch.empty(*shape, 2, **wide)
    matrices = {"new_keys": k.contiguous().flatten(-2), "new_values": v.contiguous().flatten(-2)}
    matrices |= {"keys": keys, "values": rows.values}
    given: dict[str, Any] = dict.fromkeys((*_QUESTIONS, *_OF_ROWS))
    if questions is not None:
        matrices |= {"own_keys": questions.keys, "own_values": questions.values}
        beside = questions.keys.shape[1]
        numbers = {"starts": questions.starts, "counts": questions.counts}
        given |= {"places": beside, "beside": kv_heads * beside}
    else:
        # Without PHASES `commits` is any memory of its kind.
        commits = first if rows.commits is None else rows.commits
        numbers = {"width": rows.widths(length), "commits": commits}
    given |= {name: matrix(x, tile["KEYS"], d) for name, x in matrices.items()}
    given |= {name: x.contiguous() for name, x in numbers.items()}
    windowed = rows.window is not None and not rows.plain
    launch(
        kernel,
        (triton.cdiv(length * (heads // kv_heads), tile["ROWS"]), kv_heads * pieces, count),
        tile,
        q.device,
        q=q.contiguous(),
        out=out,
        partial=partial,
        extremes=extremes,
        slots=rows.slots.contiguous(),
        first=first,
        length=length,
        size=size,
        tokens=count * length,
        stored=keys[..., 0].numel(),
        window=rows.window if windowed else EVERYTHING,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        PHASES=rows.commits is not None,
        WINDOWED=windowed,
        **given,
    )
    if pieces > 1:
        _merge_pieces(partial, extremes, first, out, size, tile)
    return out


def _merge_pieces(
    partial: Tensor, extremes: Tensor, first: Tensor, out: Tensor, size: int, split: Tile
) -> None:
    """Fills the rows of `out` [rows, n, heads, d] whose prefix is several pieces of a tile."""
    rows, pieces, pairs, d = partial.shape
    tile = tile_for("attention_merge", out.device)
    launch(
        MERGE,
        (triton.cdiv(pairs, tile["PAIRS"]), rows),
        tile,
        out.device,
        partial=partial,
        extremes=extremes,
        first=first,
        out=out,
        pairs=pairs,
        size=size,
        pieces=pieces,
        most=split["PIECES"],
        shortest=split["SHORTEST"],
        D=d,
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
    kernel = PREFILL[d > NARROW]
    tile = tile_for(kernel.name, q.device)
    padding = -sum(part.shape[1] for part in keys) % tile["KEYS"]
    positions = torch.cat((causal.keys, causal.keys.new_full((padding,), NOWHERE)))
    zeros = keys[0].new_zeros(1, 1, 1).expand(len(keys[0]), padding, d)
    k, v = (torch.cat((*parts, zeros), dim=1) for parts in (keys, values))
    kv_heads, length = k.shape[:2]
    launch(
        kernel,
        (triton.cdiv(tokens * (heads // kv_heads), tile["ROWS"]), kv_heads),
        tile,
        q.device,
        q=q,
        keys=matrix(k, tile["KEYS"], d),
        values=matrix(v, tile["KEYS"], d),
        first=causal.first.contiguous(),
        last=causal.last.contiguous(),
        positions=positions,
        out=out,
        tokens=tokens,
        length=length,
        stored=kv_heads * length,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
    )
    return out


def _serves(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> bool:
    every = tensors_of(rows)
    held = [x for x in every if x.is_floating_point()]
    stored = all(x.is_contiguous() and x[..., 0].numel() < _MOST for x in held)
    numbers = all(x.dtype == torch.int64 for x in every if not x.is_floating_point())
    known = rows.questions is None or rows.width is rows.commits is None
    return known and _has_kernel(q) and stored and numbers and multiplied(q, k, v, *held)


def _serves_packed(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> bool:
    most = max(q.numel(), sum(part.numel() for part in keys))
    served = causal is not None and most < _MOST and _has_kernel(q)
    return served and multiplied(q, *keys, *values)


def _has_kernel(q: Tensor) -> bool:
    """Whether the kernels take heads of this size."""
    d = q.shape[-1]
    return 16 <= d <= 512 and d & (d - 1) == 0


def _check(trial: Trial) -> None:
    """Prefixes of several pieces where kernels are compiled: rows of all lengths, of which one has
    no prefix and one a full ring, and with and without a question, beside what earlier requests
    left: NaN."""
    device = trial.device
    for heads, kv_heads, d, windowed in trial.sizes.attention:
        tile = tile_for(kernel_of("attention", d), device)
        size = 150 if interpreting() else tile["SHORTEST"] + 404
        n, places, before = 24, 200, size - 20
        q, k, v, keys, values, own_keys, own_values = trial.random(
            *((4, n, heads, d), (4, n, kv_heads, d), (4, n, kv_heads, d)),
            *((3, kv_heads, size, d), (3, kv_heads, size, d)),
            *((kv_heads, places, d), (kv_heads, places, d)),
        )
        for stored in (keys, values):
            stored[2, :, before:] = stored[0] = float("nan")
        for beside in (own_keys, own_values):
            beside[:, :5] = beside[:, 50:60] = beside[:, 190:] = float("nan")
        slots, first, width, commits, starts, counts = torch.tensor(
            [
                *([2, 0, 1, 2], [before, 0, 2 * size + 100, before]),
                *([24, 7, 20, 24], [0, 1, 1, 0], [5, 60, 7, 7], [45, 130, 0, 20]),
            ],
            device=device,
        )
        canvases = Rows(keys, values, slots, first, size + 1 if windowed else None, width)
        questions = Questions(own_keys, own_values, starts, counts, 130)
        inside = torch.arange(n, device=device) < width[:, None]
        kinds = (
            (canvases, inside),
            (replace(canvases, commits=commits), inside),
            (replace(canvases, width=None, questions=questions), slice(None)),
        )
        for rows, seen in kinds:
            given, right = (q * d**-0.5, k, v, rows), attention_reference.attend_padded.reference
            compare(attend_padded, right, given, part=itemgetter(seen))


def _check_packed(trial: Trial) -> None:
    """A ring that has turned, behind zeros at no position, and tokens that fill no tile."""
    (n, held), device = (40, 90), trial.device
    for heads, kv_heads, d, _ in trial.sizes.attention:
        shapes = (n, heads, d), *[(kv_heads, count, d) for count in (held, held, n, n)]
        q, old_k, old_v, k, v = trial.random(*shapes)
        zeros = torch.zeros(kv_heads, 7, d, dtype=q.dtype, device=device)
        queries = torch.arange(100 + held, 100 + held + n, device=device)
        unseen = torch.full((7,), NOWHERE, device=device)
        positions = torch.cat((unseen, torch.arange(100, 100 + held, device=device), queries))
        given = q * d**-0.5, (zeros, old_k, k), (zeros, old_v, v), Causal.of(queries, positions, 60)
        compare(attend, attention_reference.attend.reference, given)


TWINS = {
    "attend": KernelTwin("attend", attend, _serves_packed, _check_packed),
    "attend_padded": KernelTwin("attend_padded", attend_padded, _serves, _check),
}
