"""The end of a pass over the vocabulary: one program for each position.

Makes of the statistics of all blocks of ids the peak, the entropy, the argmax, one drawn token and
the most probable ones, and of the parts of the soft embedding the whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfumato.ops.triton.head_kernels import BANNED, BLOCK, NO_ID, banned_here, capped
from sfumato.ops.triton.weights import as_weight, weight_block


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
    TOP: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the most probable tokens, the best first; of equal ones the lowest id."""
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
    argmax: tl.tensor, drawn: tl.tensor, entropy: tl.tensor, out_ids: tl.tensor,
    out_probs: tl.tensor, out_soft: tl.tensor, position: tl.tensor,
    HIDDEN: tl.constexpr, TOP: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Stores zeros for a position whose results are not read."""
    tl.store(argmax + position, 0)
    tl.store(drawn + position, 0)
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
        "argmax", "drawn", "entropy", "peaks", "totals", "out_ids", "out_probs", "vocab",
        "positions", "blocks", "bans"
    ]
)  # fmt: skip
def finish_head(
    hidden: tl.tensor, weight: tl.tensor, temperature: tl.tensor, done: tl.tensor,
    uniform: tl.tensor, ban_ids: tl.tensor, ban_limits: tl.tensor, ban_row: tl.tensor,
    ban_place: tl.tensor, block_max: tl.tensor, block_sum: tl.tensor, block_shifted: tl.tensor,
    block_best: tl.tensor, soft: tl.tensor, top: tl.tensor, top_ids: tl.tensor, argmax: tl.tensor,
    drawn: tl.tensor, entropy: tl.tensor, peaks: tl.tensor, totals: tl.tensor, out_ids: tl.tensor,
    out_probs: tl.tensor, out_soft: tl.tensor, vocab: tl.tensor, positions: tl.tensor,
    blocks: tl.tensor, bans: tl.tensor, softcap: tl.tensor, root: tl.tensor,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, TOP: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, MASSES: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """The statistics of one position of a pass that has ended.

    Grid: (positions,).  What the chunks left: see `head_kernels`; uniform float64 [positions].
    Writes argmax and drawn int64, entropy, peaks (the highest score) and totals (Σ e^(s - peak))
    float32 [positions], out_ids int64 and out_probs float32 [positions, TOP], out_soft [positions,
    HIDDEN].  MASSES false: argmax, entropy, peaks and totals alone.  Every id is one of the
    vocabulary, even where the scores are no numbers.  Results of positions that are done are zeros.
    """
    weight = as_weight(weight, vocab, HIDDEN, BLOCK, DEPTH, FORMAT, DESCRIPTORS)
    position = tl.program_id(0)
    if tl.load(done + position) != 0:
        store_zeros(
            argmax, drawn, entropy, out_ids, out_probs, out_soft, position, HIDDEN, TOP, DEPTH
        )
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
        token = block * BLOCK + token_of(scores, inside)
        tl.store(drawn + position, tl.minimum(token, vocab - 1).to(tl.int64))
        store_top(top, top_ids, out_ids, out_probs, position, vocab, peak, total, TOP)
        store_soft(soft, out_soft, position, positions, total, root, HIDDEN, SPLITS, DEPTH)
