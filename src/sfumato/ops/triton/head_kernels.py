"""Kernels of the pass over the vocabulary: the scores of a chunk of ids, its soft embedding, and at
the end the statistics of each position.

Ids take the rows of a matrix product and positions its columns, so that an instruction of a wide
kind serves however few the positions are, and the order of every sum is the same for any number of
positions.  A tile is TILE ids, which share one highest score for each position; a block is BLOCK
ids, whose mass the draw sums apart.  The kernels of a chunk know nothing of how many there are; the
last one makes of the statistics of all blocks of ids the peak, the entropy, the argmax, one drawn
token and the most probable ones, and of the parts of the soft embedding the whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfumato.ops.online_softmax import TOP
from sfumato.ops.triton.kernel import Kernel, register
from sfumato.ops.triton.weights import as_descriptor, as_weight, of_forms, product, weight_block
from sfumato.ops.triton.workspaces import CHUNK

BANNED = tl.constexpr(-1e30)  # as in `ops.online_softmax`
NO_ID = tl.constexpr(-2e30)  # the score of what is no id of the vocabulary
BLOCK = tl.constexpr(64)  # as in `ops.online_softmax`


@triton.jit
def capped(products: tl.tensor, softcap: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """softcap · tanh(products / softcap) / temperature, or products / temperature where the softcap
    is 0; float32."""
    # tanh by an exponential: its error, 1e-7 of the softcap, is that of the products' rounding.
    steep = 2.0 / tl.where(softcap == 0.0, 1.0, softcap)  # what is not taken divides by no 0
    bent = 1.0 - 2.0 / (tl.exp(products * steep) + 1.0)
    scores = tl.where(softcap == 0.0, products, bent * softcap)
    return tl.maximum(scores / temperature, BANNED, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def banned_here(
    banned: tl.tensor, ids: tl.tensor, position: tl.tensor, seen: tl.tensor, ban_ids: tl.tensor,
    ban_limits: tl.tensor, ban_row: tl.tensor, ban_place: tl.tensor, bans: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """`banned`, or where one of the row's `bans` bans the id at the position; all broadcast."""
    row = tl.load(ban_row + position, mask=seen, other=0) * bans
    place = tl.load(ban_place + position, mask=seen, other=0)
    for index in range(bans):
        at = tl.load(ban_ids + row + index, mask=seen, other=-1)
        limit = tl.load(ban_limits + row + index, mask=seen, other=0)
        banned |= (at == ids) & (limit > place)
    return banned


@triton.jit
def any_running(done: tl.tensor, position: tl.tensor, positions: tl.tensor) -> tl.tensor:
    """Whether one of these positions is of a row that is not done."""
    is_done = tl.load(done + position, mask=position < positions, other=1)
    return tl.sum((is_done == 0).to(tl.int32)) > 0


@triton.jit
def products_of(
    hidden: tl.tensor, weight: tl.tensor, first_id: tl.tensor, first_position: tl.tensor,
    vocab: tl.tensor,
    HIDDEN: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr, POSITIONS: tl.constexpr,
    DEPTH: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """weight rows from first_id on @ hidden rows from first_position on, transposed: float32 [TILE,
    POSITIONS]."""
    sums = tl.zeros((TILE, POSITIONS), tl.float32)
    for column in range(0, HIDDEN, DEPTH):
        rows = weight_block(weight, first_id, column, vocab, HIDDEN, TILE, DEPTH, FORMAT, DTYPE)
        sums = product(rows, hidden.load([first_position, column]).T, sums, UPCAST)
    return sums


@triton.jit
def store_blocks(
    scores: tl.tensor, first: tl.tensor, position: tl.tensor, seen: tl.tensor, blocks: tl.tensor,
    block_max: tl.tensor, block_sum: tl.tensor, block_shifted: tl.tensor, block_best: tl.tensor,
    TILE: tl.constexpr, POSITIONS: tl.constexpr,
) -> None:  # fmt: skip
    """Stores figures of each BLOCK scores, of [TILE, POSITIONS] from block `first` on: the highest,
    Σ e^(s - max), Σ e^(s - max) · (s - max), and the place of the highest, the lowest of equal
    ones."""
    COUNT: tl.constexpr = TILE // BLOCK
    parted = tl.reshape(scores, (COUNT, BLOCK, POSITIONS))
    best, place = tl.max(parted, axis=1, return_indices=True, return_indices_tie_break_left=True)
    shifted = parted - tl.expand_dims(best, 1)
    mass = tl.exp(shifted)
    block = first + tl.arange(0, COUNT)
    where = position[None, :].to(tl.int64) * blocks + block[:, None]
    kept = seen[None, :] & (block < blocks)[:, None]
    tl.store(block_max + where, best, mask=kept)
    tl.store(block_sum + where, tl.sum(mass, axis=1), mask=kept)
    tl.store(block_shifted + where, tl.sum(mass * shifted, axis=1), mask=kept)
    tl.store(block_best + where, place.to(tl.int8), mask=kept)


@triton.jit(
    do_not_specialize=[
        "temperature", "done", "ban_ids", "ban_limits", "ban_row", "ban_place", "first_id",
        "vocab", "positions", "blocks", "bans"
    ]
)  # fmt: skip
def score_chunk(
    hidden: tl.tensor, weight: tl.tensor, temperature: tl.tensor, done: tl.tensor,
    ban_ids: tl.tensor, ban_limits: tl.tensor, ban_row: tl.tensor, ban_place: tl.tensor,
    scores: tl.tensor, masses: tl.tensor, tile_max: tl.tensor, block_max: tl.tensor,
    block_sum: tl.tensor, block_shifted: tl.tensor, block_best: tl.tensor, first_id: tl.tensor,
    vocab: tl.tensor, positions: tl.tensor, blocks: tl.tensor, bans: tl.tensor, softcap: tl.tensor,
    HIDDEN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, POSITIONS: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, MASSES: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """The scores of a tile of ids, their masses, and the statistics of its blocks.

    Grid: (tiles of the chunk, ⌈positions / POSITIONS⌉).  hidden [positions, HIDDEN] and weight
    [vocab, HIDDEN]: see `weights.as_descriptor`; temperature float32 and done bool [positions];
    the bans as in `ops.Bans`, int64, none where `bans` is 0.  Writes scores float32 and masses
    e^(score - tile_max) [positions, CHUNK], tile_max float32 [positions, CHUNK / TILE], and block_*
    [positions, blocks].  MASSES false: block_* alone.  A program all of whose positions are done
    leaves early and writes nothing.
    """
    position = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    if not any_running(done, position, positions):
        return
    hidden = as_descriptor(hidden, positions, HIDDEN, POSITIONS, DEPTH, DESCRIPTORS)
    weight = as_weight(weight, vocab, HIDDEN, TILE, DEPTH, FORMAT, DESCRIPTORS)
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    ids = first_id + place
    known, seen = ids < vocab, position < positions
    sums = products_of(
        hidden, weight, first_id + tile * TILE, tl.program_id(1) * POSITIONS, vocab, HIDDEN, FORMAT,
        TILE, POSITIONS, DEPTH, masses.dtype.element_ty, UPCAST,
    )  # fmt: skip
    divisor = tl.load(temperature + position, mask=seen, other=1.0)
    score = capped(sums, softcap, divisor[None, :])
    if bans > 0:
        banned = banned_here(
            tl.zeros((TILE, POSITIONS), tl.int1), ids[:, None], position[None, :], seen[None, :],
            ban_ids, ban_limits, ban_row, ban_place, bans,
        )  # fmt: skip
        score = tl.where(banned, BANNED, score)
    score = tl.where(known[:, None], score, NO_ID)
    if MASSES:
        best = tl.max(score, axis=0)
        tl.store(tile_max + position * (CHUNK // TILE) + tile, best, mask=seen)
        where = position[None, :] * CHUNK + place[:, None]
        tl.store(scores + where, score, mask=seen[None, :])
        mass = tl.exp(score - best[None, :]).to(masses.dtype.element_ty)
        tl.store(masses + where, mass, mask=seen[None, :])
    store_blocks(
        score, (first_id + tile * TILE) // BLOCK, position, seen, blocks, block_max, block_sum,
        block_shifted, block_best, TILE, POSITIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["done", "first_id", "vocab"])
def merge_top(
    scores: tl.tensor, tile_max: tl.tensor, top: tl.tensor, top_ids: tl.tensor, done: tl.tensor,
    first_id: tl.tensor, vocab: tl.tensor,
    CHUNK: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """Takes a chunk's highest scores into the TOP best of a position, in no order.

    Grid: (positions,).  top float32 and top_ids int32 [positions, TOP], of which the first chunk
    reads none; the others as in `score_chunk`.  Of equal scores the lower id is better.  Tiles
    whose highest score is no candidate are not read.  A launch of its own, since of the programs of
    `embed_chunk`, with their shared memory, a multiprocessor holds one.
    """
    position = tl.program_id(0)
    if tl.load(done + position) != 0:
        return
    begun = first_id > 0
    TILES: tl.constexpr = CHUNK // TILE
    slot = tl.arange(0, TOP)
    best = tl.load(top + position * TOP + slot, mask=(slot >= 0) & begun, other=NO_ID)
    # What fills empty slots: no two alike, and worse than any id.
    best_ids = tl.load(top_ids + position * TOP + slot, mask=(slot >= 0) & begun, other=0)
    best_ids = tl.where(begun, best_ids, vocab + slot)
    index = tl.arange(0, triton.next_power_of_2(TILES))
    tiles = tl.minimum(tl.cdiv(vocab - first_id, TILE), TILES)
    ceilings = tl.load(tile_max + position * TILES + index, mask=index < tiles, other=2 * NO_ID)
    place = tl.arange(0, TILE)
    least = tl.min(best)
    ceiling = tl.max(ceilings)
    while ceiling >= least:
        tile = tl.argmax(ceilings, axis=0)
        ceilings = tl.where(index == tile, 2 * NO_ID, ceilings)
        first = first_id + tile * TILE
        left = tl.load(scores + position * CHUNK + tile * TILE + place)
        left = tl.where(first + place < vocab, left, 2 * NO_ID)
        better = 1
        while better > 0:
            score = tl.max(left)
            at = tl.argmax(left, axis=0)
            worst = tl.max(tl.where(best == least, best_ids, -1))
            ahead = (score > least) | ((score == least) & (first + at < worst))
            better = tl.where(ahead, 1, 0)
            replaced = (best_ids == worst) & (better > 0)
            best = tl.where(replaced, score, best)
            best_ids = tl.where(replaced, first + at, best_ids)
            left = tl.where(place == at, 2 * NO_ID, left)
            least = tl.min(best)
        ceiling = tl.max(ceilings)
    tl.store(top + position * TOP + slot, best)
    tl.store(top_ids + position * TOP + slot, best_ids)


@triton.jit(do_not_specialize=["peaks", "done", "first_id", "vocab", "positions"])
def embed_chunk(
    weight: tl.tensor, masses: tl.tensor, tile_max: tl.tensor, peaks: tl.tensor, soft: tl.tensor,
    done: tl.tensor, first_id: tl.tensor, vocab: tl.tensor, positions: tl.tensor,
    HIDDEN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds a chunk's masses to COLUMNS × POSITIONS elements of one part of the soft embedding.

    Grid: (⌈HIDDEN / COLUMNS⌉, SPLITS, ⌈positions / POSITIONS⌉).  soft float32 [SPLITS, positions,
    HIDDEN]: Σ mass · weight of the tiles of each split, relative to the peak; peaks float32 [2,
    positions].  The first chunk reads none of what it writes.  What `score_chunk` left out is left
    out here.
    """
    TILES: tl.constexpr = CHUNK // TILE
    PADDED: tl.constexpr = triton.next_power_of_2(TILES)
    EACH: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    position = tl.program_id(2) * POSITIONS + tl.arange(0, POSITIONS)
    if not any_running(done, position, positions):
        return
    weight = as_weight(weight, vocab, HIDDEN, TILE, COLUMNS, FORMAT, DESCRIPTORS)
    begun, split = first_id > 0, tl.program_id(1)
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    seen, within = position < positions, column < HIDDEN
    tiles = tl.minimum(tl.cdiv(vocab - first_id, TILE), TILES)

    index = tl.arange(0, PADDED)
    ceilings = tl.load(
        tile_max + position[:, None] * TILES + index[None, :],
        mask=seen[:, None] & (index < tiles)[None, :],
        other=NO_ID,
    )
    # The peaks of before the chunk and after it stand in two places, which take turns.
    turn = first_id // CHUNK % 2
    before = tl.load(peaks + turn * positions + position, mask=seen & begun, other=NO_ID)
    peak = tl.maximum(before, tl.max(ceilings, axis=1))
    owner = (tl.program_id(0) + split) == 0
    tl.store(peaks + (1 - turn) * positions + position, peak, mask=seen & owner)

    sums = tl.zeros((COLUMNS, POSITIONS), tl.float32)
    ids = tl.arange(0, TILE)
    for tile in range(split * EACH, tl.minimum((split + 1) * EACH, tiles)):
        at = tile * TILE + ids
        rows = weight_block(
            weight, first_id + tile * TILE, first, vocab, HIDDEN, TILE, COLUMNS, FORMAT,
            masses.dtype.element_ty,
        )  # fmt: skip
        mass = tl.load(
            masses + position[None, :] * CHUNK + at[:, None], mask=seen[None, :], other=0.0
        )
        nothing = tl.zeros((COLUMNS, POSITIONS), tl.float32)
        part = product(rows.T, mass, nothing, UPCAST)
        best = tl.load(tile_max + position * TILES + tile, mask=seen, other=NO_ID)
        sums += part * tl.exp(best - peak)[None, :]

    into = soft + (split * positions + position[None, :]).to(tl.int64) * HIDDEN + column[:, None]
    kept = seen[None, :] & within[:, None]
    older = tl.load(into, mask=kept & begun, other=0.0)
    tl.store(into, older * tl.exp(before - peak)[None, :] + sums, mask=kept)


@triton.jit
def distribution(
    position: tl.tensor, blocks: tl.tensor, block_max: tl.tensor, block_sum: tl.tensor,
    block_shifted: tl.tensor, block_best: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Peak, mass, entropy and argmax of a position, and of each block its mass relative to the
    peak, float32 [BLOCKS]."""
    index = tl.arange(0, BLOCKS)
    here, at = index < blocks, position.to(tl.int64) * blocks + index
    best = tl.load(block_max + at, mask=here, other=2 * NO_ID)
    peak = tl.max(best)
    drop = best - peak
    fade = tl.exp(drop)
    sums = tl.load(block_sum + at, mask=here, other=0.0)
    shifted = tl.load(block_shifted + at, mask=here, other=0.0)
    mass = fade * sums
    total = tl.sum(mass)
    # The moments of a block were taken around its own best score.
    moment = tl.sum(fade * (shifted + sums * drop))
    entropy = tl.maximum(tl.log(total) - moment / total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    first = tl.argmax(best, axis=0, tie_break_left=True)
    within = tl.load(block_best + position.to(tl.int64) * blocks + first)
    return peak, total, entropy, first * BLOCK + within.to(tl.int32), mass


@triton.jit
def block_of(
    mass: tl.tensor, uniform: tl.tensor, blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where a draw falls: the block, and how far into its mass, float64 from 0 to 1; as
    `model.most_probable.locate`."""
    index = tl.arange(0, BLOCKS)
    wide = mass.to(tl.float64)
    ends = tl.cumsum(wide, axis=0)
    total = tl.max(ends)
    # A uniform next to 1 may round up to the whole mass, past the last token that has any.
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(uniform * total, below)
    block = tl.minimum(tl.sum(((ends <= target) & (index < blocks)).to(tl.int32)), blocks - 1)
    chosen = index == block
    inside = target - tl.sum(tl.where(chosen, ends - wide, 0.0))
    inside = inside / tl.sum(tl.where(chosen, wide, 0.0))
    return block, tl.minimum(tl.maximum(inside, 0.0), 1.0)


@triton.jit
def token_of(scores: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The first place whose share of the cumulated mass exceeds `inside`; as
    `model.most_probable.inverse_cdf`."""
    place = tl.arange(0, BLOCK)
    wide = tl.exp(scores - tl.max(scores)).to(tl.float64)
    ends = tl.cumsum(wide, axis=0)
    passed = tl.sum((ends <= inside * tl.max(ends)).to(tl.int32))
    # Rounding can put the target at or past the end: the last token with any mass is taken.
    return tl.maximum(tl.minimum(passed, tl.max(tl.where(wide > 0, place, 0))), 0)


@triton.jit
def block_scores(
    hidden: tl.tensor, weight: tl.tensor, temperature: tl.tensor, ban_ids: tl.tensor,
    ban_limits: tl.tensor, ban_row: tl.tensor, ban_place: tl.tensor, position: tl.tensor,
    block: tl.tensor, vocab: tl.tensor, bans: tl.tensor, softcap: tl.tensor,
    HIDDEN: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The scores float32 [BLOCK] of a block's ids at a position; -inf past the vocabulary."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((BLOCK, DEPTH), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        column = start + depth
        rows = weight_block(
            weight, block * BLOCK, start, vocab, HIDDEN, BLOCK, DEPTH, FORMAT,
            hidden.dtype.element_ty,
        )  # fmt: skip
        states = tl.load(
            hidden + position.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN, other=0.0
        )
        sums += rows.to(tl.float32) * states.to(tl.float32)[None, :]
    score = capped(tl.sum(sums, axis=1), softcap, tl.load(temperature + position))
    if bans > 0:
        everywhere = ids >= 0
        banned = banned_here(
            ids < 0, ids, position + 0 * ids, everywhere, ban_ids, ban_limits, ban_row, ban_place,
            bans,
        )  # fmt: skip
        score = tl.where(banned, BANNED, score)
    return tl.where(ids < vocab, score, float("-inf"))


@triton.jit
def store_top(
    top: tl.tensor, top_ids: tl.tensor, out_ids: tl.tensor, out_probs: tl.tensor,
    position: tl.tensor, vocab: tl.tensor, peak: tl.tensor, total: tl.tensor,
    token: tl.tensor, prob: tl.tensor,
    TOP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Stores the most probable tokens, the best first; of equal ones the lowest id. Returns the
    probability of a token as `online_softmax.probs_of`: `prob`, where it is none of these."""
    slot = tl.arange(0, TOP)
    score = tl.load(top + position * TOP + slot)
    ids = tl.load(top_ids + position * TOP + slot)
    # The same again along the other axis, so that each is compared with each.
    others = tl.load(top + position * TOP + slot[None, :])
    other_ids = tl.load(top_ids + position * TOP + slot[None, :])
    equal = others == score[:, None]
    ahead = (others > score[:, None]) | (equal & (other_ids < ids[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    known = ids < vocab
    tl.store(out_ids + position * TOP + rank, tl.where(known, ids, 0).to(tl.int64))
    probs = tl.where(known, tl.exp(score - peak) / total, 0.0)
    tl.store(out_probs + position * TOP + rank, probs)
    is_token = known & (ids == token)
    least = tl.min(tl.where(known, probs, 1.0))
    other = tl.minimum(prob, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(
        tl.sum(is_token.to(tl.int32)) > 0, tl.sum(tl.where(is_token, probs, 0.0)), other
    )


@triton.jit
def store_soft(
    soft: tl.tensor, out_soft: tl.tensor, position: tl.tensor, positions: tl.tensor,
    total: tl.tensor, root: tl.tensor,
    HIDDEN: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Stores Σ p · embedding · sqrt(hidden) of a position: the sum of its parts, in order."""
    for start in range(0, HIDDEN, DEPTH):
        column = start + tl.arange(0, DEPTH)
        within = column < HIDDEN
        value = tl.zeros((DEPTH,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = (split * positions + position).to(tl.int64) * HIDDEN + column
            value += tl.load(soft + at, mask=within, other=0.0)
        value = value / total * root
        out = out_soft + position.to(tl.int64) * HIDDEN + column
        tl.store(out, value.to(out_soft.dtype.element_ty), mask=within)


@triton.jit
def store_zeros(
    argmax: tl.tensor, drawn: tl.tensor, drawn_probs: tl.tensor, entropy: tl.tensor,
    out_ids: tl.tensor, out_probs: tl.tensor, out_soft: tl.tensor, position: tl.tensor,
    HIDDEN: tl.constexpr, TOP: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Stores zeros for a position whose results are not read."""
    tl.store(argmax + position, 0)
    tl.store(drawn + position, 0)
    tl.store(drawn_probs + position, 0.0)
    tl.store(entropy + position, 0.0)
    slot = position * TOP + tl.arange(0, TOP)
    tl.store(out_ids + slot, tl.zeros((TOP,), tl.int64))
    tl.store(out_probs + slot, tl.zeros((TOP,), tl.float32))
    for start in range(0, HIDDEN, DEPTH):
        column = start + tl.arange(0, DEPTH)
        out = out_soft + position.to(tl.int64) * HIDDEN + column
        tl.store(out, tl.zeros((DEPTH,), out_soft.dtype.element_ty), mask=column < HIDDEN)


@triton.jit(
    do_not_specialize=[
        "temperature", "done", "uniform", "ban_ids", "ban_limits", "ban_row", "ban_place",
        "argmax", "drawn", "drawn_probs", "entropy", "peaks", "totals", "out_ids", "out_probs",
        "vocab", "positions", "blocks", "bans"
    ]
)  # fmt: skip
def finish_head(
    hidden: tl.tensor, weight: tl.tensor, temperature: tl.tensor, done: tl.tensor,
    uniform: tl.tensor, ban_ids: tl.tensor, ban_limits: tl.tensor, ban_row: tl.tensor,
    ban_place: tl.tensor, block_max: tl.tensor, block_sum: tl.tensor, block_shifted: tl.tensor,
    block_best: tl.tensor, soft: tl.tensor, top: tl.tensor, top_ids: tl.tensor, argmax: tl.tensor,
    drawn: tl.tensor, drawn_probs: tl.tensor, entropy: tl.tensor, peaks: tl.tensor,
    totals: tl.tensor, out_ids: tl.tensor, out_probs: tl.tensor, out_soft: tl.tensor,
    vocab: tl.tensor, positions: tl.tensor, blocks: tl.tensor, bans: tl.tensor,
    softcap: tl.tensor, root: tl.tensor,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, TOP: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, MASSES: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """The statistics of one position of a pass that has ended.

    Grid: (positions,).  What the chunks left: see above; uniform float64 [positions].
    Writes argmax and drawn int64, drawn_probs, entropy, peaks (the highest score) and totals
    (Σ e^(s - peak)) float32 [positions], out_ids int64 and out_probs float32 [positions, TOP],
    out_soft [positions, HIDDEN].  MASSES false: argmax, entropy, peaks and totals alone.  Every id
    is one of the vocabulary, even where the scores are no numbers.  Results of positions that are
    done are zeros.
    """
    weight = as_weight(weight, vocab, HIDDEN, BLOCK, DEPTH, FORMAT, DESCRIPTORS)
    position = tl.program_id(0)
    if tl.load(done + position) != 0:
        store_zeros(
            argmax, drawn, drawn_probs, entropy, out_ids, out_probs, out_soft, position, HIDDEN,
            TOP, DEPTH
        )  # fmt: skip
        return
    peak, total, spread, best, mass = distribution(
        position, blocks, block_max, block_sum, block_shifted, block_best, BLOCKS
    )
    tl.store(argmax + position, tl.minimum(best, vocab - 1).to(tl.int64))
    tl.store(entropy + position, spread)
    tl.store(peaks + position, peak)
    tl.store(totals + position, total)
    if MASSES:
        block, inside = block_of(mass, tl.load(uniform + position), blocks, BLOCKS)
        scores = block_scores(
            hidden, weight, temperature, ban_ids, ban_limits, ban_row, ban_place, position, block,
            vocab, bans, softcap, HIDDEN, DEPTH, FORMAT,
        )  # fmt: skip
        place = token_of(scores, inside)
        token = tl.minimum(block * BLOCK + place, vocab - 1)
        tl.store(drawn + position, token.to(tl.int64))
        score = tl.sum(tl.where(tl.arange(0, BLOCK) == place, scores, 0.0))
        prob = store_top(
            top, top_ids, out_ids, out_probs, position, vocab, peak, total, token,
            tl.exp(score - peak) / total, TOP,
        )  # fmt: skip
        tl.store(drawn_probs + position, prob)
        store_soft(soft, out_soft, position, positions, total, root, HIDDEN, SPLITS, DEPTH)


_BANS = {**dict.fromkeys(("ban_ids", "ban_limits", "ban_row", "ban_place"), "*i64"), "bans": "i32"}
BLOCK_STATISTICS = {
    **dict.fromkeys(("block_max", "block_sum", "block_shifted"), "*fp32:16"),
    "block_best": "*i8:16",
}
_NUMBERS = {"vocab": "i32", "positions": "i32", "softcap": "fp32"}
_MASSES = {"masses": "*bf16:16", "tile_max": "*fp32:16", "first_id": "i32"}
_TOP = {"top": "*fp32:16", "top_ids": "*i32:16", "soft": "*fp32:16"}

_DECIDE = {"decide": {"MASSES": False}}  # see `vocabulary_mass`

SCORE_CHUNK = of_forms(
    Kernel(
        "score_chunk",
        score_chunk,
        {
            **(_BANS | BLOCK_STATISTICS | _NUMBERS | _MASSES),
            "scores": "*fp32:16",
            "hidden": "tensordesc<bf16[{POSITIONS}, {DEPTH}]>",
            "weight": "tensordesc<bf16[{TILE}, {DEPTH}]>",
            "temperature": "*fp32",
            "done": "*u1",
            "blocks": "i32",
        },
        {"HIDDEN": 2816, "CHUNK": CHUNK, "FORMAT": 0, "MASSES": True},
        _DECIDE,
    ),
    *("HIDDEN", "Q6_K"),
)

EMBED_CHUNK = of_forms(
    Kernel(
        "embed_chunk",
        embed_chunk,
        {
            "weight": "tensordesc<bf16[{TILE}, {COLUMNS}]>",
            "vocab": "i32",
            "positions": "i32",
            **_MASSES,
            "soft": "*fp32:16",
            "peaks": "*fp32",
            "done": "*u1",
        },
        {"HIDDEN": 2816, "CHUNK": CHUNK, "FORMAT": 0},
    ),
    *("HIDDEN", "Q6_K"),
)

MERGE_TOP = register(
    Kernel(
        "merge_top",
        merge_top,
        {
            **dict.fromkeys(("scores", "tile_max", "top"), "*fp32:16"),
            "top_ids": "*i32:16",
            "done": "*u1",
            "first_id": "i32",
            "vocab": "i32",
        },
        {"CHUNK": CHUNK, "TILE": 128, "TOP": TOP},
        shapes={"64 ids": {"TILE": 64}},
    )
)

FINISH_HEAD = of_forms(
    Kernel(
        "finish_head",
        finish_head,
        {
            **(_BANS | BLOCK_STATISTICS | _NUMBERS | _TOP),
            "hidden": "*bf16:16",
            "temperature": "*fp32",
            "done": "*u1",
            "weight": "tensordesc<bf16[64, {DEPTH}]>",
            "uniform": "*fp64",
            "argmax": "*i64",
            "drawn": "*i64",
            "drawn_probs": "*fp32",
            "entropy": "*fp32",
            "peaks": "*fp32",
            "totals": "*fp32",
            "out_ids": "*i64",
            "out_probs": "*fp32",
            "out_soft": "*bf16:16",
            "blocks": "i32",
            "root": "fp32",
        },
        {"HIDDEN": 2816, "BLOCKS": 4096, "SPLITS": 3, "TOP": TOP, "FORMAT": 0, "MASSES": True},
        _DECIDE,
    ),
    *("HIDDEN", "Q6_K"),
)
