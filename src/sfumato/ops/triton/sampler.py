"""The decision of a step: acceptance within the entropy bound, new tokens, the stop test.

One program moves one row on, and packs what the host is to learn.  As `diffusion.step.update` and
`packed` do for rows whose rules are `EntropyBound` and `StableAndConfident`; of equal entropies the
lower position comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.tiles import tile_for


class Rows(Protocol):
    """The state of rows, as a `StepBatch` has it; integers int64, flags bool, parts of one record
    for each row."""

    tokens: Tensor  # [R, W]
    pinned: Tensor  # [R, W]
    history: Tensor  # [R, H, W]
    max_steps: Tensor  # [R], as the next ones
    step: Tensor
    unchanged: Tensor
    cold: Tensor
    converged: Tensor
    done: Tensor


@dataclass(frozen=True)
class Settings:
    """Each row's rules; see `EntropyBound` and `StableAndConfident`."""

    bound: Tensor  # float32 [R]
    stability: Tensor  # int64 [R]
    confidence: Tensor  # float32 [R]; -inf where the rule never ends a canvas


@triton.jit
def _ordered(entropy: tl.tensor) -> tl.tensor:
    """Integers that rise with entropies, which are 0 or more; NaN comes last."""
    return entropy.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _within_bound(
    entropy: tl.tensor, place: tl.tensor, entropies: tl.tensor, pinned: tl.tensor,
    bound: tl.tensor, width: tl.tensor,
    PLACES: tl.constexpr, AT_ONCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the summed entropy of the positions of less entropy stays within the bound.

    Each position sums what stands before it in that order, itself included, in float64, as torch
    sums on a CPU; a sort is not needed.  entropies and pinned: those of the row.
    """
    mine = _ordered(entropy)
    total = tl.zeros((PLACES,), tl.float64)
    for start in range(0, width, AT_ONCE):
        other_place = start + tl.arange(0, AT_ONCE)
        here = other_place < width
        fixed = tl.load(pinned + other_place, mask=here, other=0) >= 0
        other = tl.load(entropies + other_place, mask=here & (fixed == 0), other=0.0)
        theirs = _ordered(other)
        before = theirs[None, :] < mine[:, None]
        equal = theirs[None, :] == mine[:, None]
        before |= equal & (other_place[None, :] <= place[:, None])
        counted = before & here[None, :]
        total += tl.sum(tl.where(counted, other[None, :].to(tl.float64), 0.0), axis=1)
    # Cumulative minus own in float32, as the reference computes it.
    return total.to(tl.float32) - entropy <= bound


@triton.jit
def _pack_words(
    words: tl.tensor, row: tl.tensor, step: tl.tensor, flags: tl.tensor, argmax: tl.tensor,
    entropy: tl.tensor, accepted: tl.tensor, top_ids: tl.tensor, top_probs: tl.tensor,
    place: tl.tensor, width: tl.tensor,
    TOP: tl.constexpr,
) -> None:  # fmt: skip
    """Writes a row's words int32, in the order of `diffusion.step.packed`."""
    inside = place < width
    first = words + row * (2 + width * (3 + 2 * TOP))
    tl.store(first, step.to(tl.int32))
    tl.store(first + 1, flags)
    first += 2
    tl.store(first + place, argmax.to(tl.int32), mask=inside)
    tl.store(first + width + place, entropy.to(tl.int32, bitcast=True), mask=inside)
    tl.store(first + 2 * width + place, accepted.to(tl.int32), mask=inside)
    for slot in tl.static_range(TOP):
        at = place * TOP + slot
        source = row * width * TOP + at
        ids = tl.load(top_ids + source, mask=inside, other=0)
        probs = tl.load(top_probs + source, mask=inside, other=0.0)
        tl.store(first + 3 * width + at, ids.to(tl.int32), mask=inside)
        tl.store(first + (3 + TOP) * width + at, probs.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _shift_history(
    history: tl.tensor, argmax: tl.tensor, place: tl.tensor, kept: tl.tensor, width: tl.tensor,
    HISTORY: tl.constexpr,
) -> None:  # fmt: skip
    """Drops a row's oldest argmax canvas and appends the newest, where `kept`."""
    for index in tl.static_range(HISTORY - 1):
        newer = tl.load(history + (index + 1) * width + place, mask=kept, other=0)
        tl.debug_barrier()
        tl.store(history + index * width + place, newer, mask=kept)
        tl.debug_barrier()
    tl.store(history + (HISTORY - 1) * width + place, argmax, mask=kept)


@triton.jit
def _move_rows(
    tokens: tl.tensor, pinned: tl.tensor, history: tl.tensor, max_steps: tl.tensor,
    step: tl.tensor, unchanged: tl.tensor, cold: tl.tensor, converged: tl.tensor, done: tl.tensor,
    argmax: tl.tensor, drawn: tl.tensor, entropy: tl.tensor, top_ids: tl.tensor,
    top_probs: tl.tensor, fresh: tl.tensor, bound: tl.tensor, stability: tl.tensor,
    confidence: tl.tensor, words: tl.tensor, width: tl.tensor, stride: tl.tensor,
    flag_stride: tl.tensor,
    HISTORY: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, AT_ONCE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """Moves a row one step on, in place, and packs what the host learns.  Grid: (rows,).

    The state as in `Rows`, rows `stride` int64 or `flag_stride` bytes apart; the statistics [rows ·
    width, …] as in `HeadStats`, fresh int64 [rows, width]; the rules as in `Settings`.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    inside = place < width
    at, own = row * width + place, row * stride
    fixed_token = tl.load(pinned + own + place, mask=inside, other=0)
    fixed = fixed_token >= 0
    spread = tl.load(entropy + at, mask=inside & (fixed == 0), other=0.0)
    argmax_token = tl.load(argmax + at, mask=inside, other=0)
    draw = tl.load(drawn + at, mask=inside, other=0)
    draw = tl.where(tl.load(cold + row * flag_stride) != 0, argmax_token, draw)
    best = tl.where(fixed, fixed_token, argmax_token)
    draw = tl.where(fixed, fixed_token, draw)

    last = tl.load(history + own + (HISTORY - 1) * width + place, mask=inside, other=0)
    same = tl.sum((inside & (best != last)).to(tl.int32)) == 0
    steady = tl.where(same, tl.load(unchanged + own) + 1, 0)
    free = tl.maximum(tl.sum((inside & (fixed == 0)).to(tl.int32)), 1)
    mean = tl.sum(spread.to(tl.float64)).to(tl.float32) / free.to(tl.float32)
    stop = (mean < tl.load(confidence + row)) & (steady >= tl.load(stability + row))
    accepted = fixed | _within_bound(
        spread, place, entropy + row * width, pinned + own, tl.load(bound + row), width, PLACES,
        AT_ONCE,
    )  # fmt: skip

    frozen = tl.load(done + row * flag_stride) != 0
    steps = tl.load(step + own) + tl.where(frozen, 0, 1)
    settled = (tl.load(converged + row * flag_stride) != 0) | (stop & (frozen == 0))
    ended = frozen | settled | (steps >= tl.load(max_steps + own))
    # NaN and infinity have the highest exponent.
    odd = tl.sum((inside & (_ordered(spread) >= 0x7F800000)).to(tl.int32)) > 0
    flags = tl.where(ended, 1, 0) + tl.where(settled, 2, 0) + tl.where(odd, 4, 0)
    flags += tl.where(frozen, 8, 0)
    tl.debug_barrier()  # all has been read

    kept = inside & (frozen == 0)
    new = tl.where(accepted, draw, tl.load(fresh + at, mask=inside, other=0))
    tl.store(tokens + own + place, new, mask=kept)
    _shift_history(history + own, best, place, kept, width, HISTORY)
    tl.store(unchanged + own, steady, mask=frozen == 0)
    tl.store(step + own, steps)
    tl.store(converged + row * flag_stride, settled)
    tl.store(done + row * flag_stride, ended)
    _pack_words(
        words, row, steps, flags, best, spread, accepted, top_ids, top_probs, place, width, TOP
    )


_STATE = ("tokens", "pinned", "history", "max_steps", "step", "unchanged")
_FLAGS = ("cold", "converged", "done")
_FLOATS = ("entropy", "top_probs", "bound", "confidence")
_INTEGERS = ("argmax", "drawn", "top_ids", "fresh", "stability")

MOVE_ROWS = register(
    Kernel(
        "move_rows",
        _move_rows,
        {
            **dict.fromkeys((*_STATE, *_INTEGERS), "*i64"),
            **dict.fromkeys(_FLAGS, "*i1"),
            **dict.fromkeys(_FLOATS, "*fp32"),
            "words": "*i32",
            **dict.fromkeys(("width", "stride", "flag_stride"), "i32"),
        },
        {"HISTORY": 1, "TOP": 8, "PLACES": 256},
    )
)


def move_rows(
    rows: Rows,
    settings: Settings,
    argmax: Tensor,
    drawn: Tensor,
    entropy: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    fresh: Tensor,
) -> Tensor:
    """Moves rows one step on, in place, and returns what the host is to learn: int32 [R, words].

    argmax, drawn int64 and entropy float32 [R · W], top_ids int64 and top_probs float32 [R · W,
    TOP], contiguous, as the head gives them; fresh int64 [R, W].  A row that is done stays as it
    is.  Soft embeddings are the caller's, who reads `rows.done` before this.
    """
    count, width = rows.tokens.shape
    history, top = rows.history.shape[1], top_ids.shape[-1]
    state = {name: getattr(rows, name) for name in (*_STATE, *_FLAGS)}
    stride, flag_stride = rows.tokens.stride(0), rows.done.stride(0)
    assert all(state[name].stride(0) == stride for name in _STATE)
    assert all(state[name].stride(0) == flag_stride for name in _FLAGS)
    words = torch.empty(count, 2 + width * (3 + 2 * top), dtype=torch.int32, device=entropy.device)
    statistics = {"argmax": argmax, "drawn": drawn, "entropy": entropy, "top_ids": top_ids}
    statistics |= {"top_probs": top_probs, "fresh": fresh}
    launch(
        MOVE_ROWS,
        (count,),
        tile_for("move_rows", entropy.device),
        entropy.device,
        **state,
        **{name: each.contiguous() for name, each in statistics.items()},
        bound=settings.bound,
        stability=settings.stability,
        confidence=settings.confidence,
        words=words,
        width=width,
        stride=stride,
        flag_stride=flag_stride,
        HISTORY=history,
        TOP=top,
        PLACES=triton.next_power_of_2(width),
    )
    return words
