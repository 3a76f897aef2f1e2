"""What a step decides where the state of the rows lives: its noise, acceptance within the entropy
bound, new tokens, the stop test.

Temperatures, uniforms and new tokens are those of `diffusion.noise`, bit for bit.  One program
moves one row on, and packs what the host is to learn.  As `diffusion.step.update` and
`packed` do for rows whose rules are `EntropyBound` and `StableAndConfident`; of equal entropies the
lower position comes first.  Before that, one program takes the soft embedding of one position.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.self_test import KernelTwin, Trial
from sfumato.ops.triton.tiles import tile_for

MOST_PLACES = 1024
"""Positions of a row, for each of which a program sums all others."""


@triton.jit
def philox_words(
    low: tl.tensor, high: tl.tensor, position: tl.tensor, step: tl.tensor, canvas: tl.tensor,
    attempt: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The first three 32-bit words of Philox4x32-10 of a counter, uint32; the words of the seed and
    of the counter are integers below 2³²."""
    nothing = position * 0
    first, second, third, _ = tl.philox_impl(
        position.to(tl.uint32),
        (nothing + step).to(tl.uint32),
        (nothing + canvas).to(tl.uint32),
        (nothing + attempt).to(tl.uint32),
        (nothing + low).to(tl.uint32),
        (nothing + high).to(tl.uint32),
    )
    return first, second, third


@triton.jit(
    do_not_specialize=[
        "seeds", "canvas", "attempt", "step", "max_steps", "temperatures", "temperature",
        "uniforms", "fresh", "width", "vocab", "stride", "temperature_stride"
    ]
)  # fmt: skip
def _step_noise(
    seeds: tl.tensor, canvas: tl.tensor, attempt: tl.tensor, step: tl.tensor,
    max_steps: tl.tensor, temperatures: tl.tensor, temperature: tl.tensor, uniforms: tl.tensor,
    fresh: tl.tensor, width: tl.tensor, vocab: tl.tensor, stride: tl.tensor,
    temperature_stride: tl.tensor,
    PLACES: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The noise of a row's next step.  Grid: (rows,).

    seeds, canvas, attempt, step, max_steps int64 and temperatures float32 of each row, rows
    `stride` and `temperature_stride` elements apart.  Writes temperature float32, uniforms float64
    and fresh int64 [rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    at, inside = row * width + place, place < width
    done = tl.load(step + row * stride)
    # A row that is done may have no next step in its table.
    now = tl.minimum(done, tl.load(max_steps + row * stride) - 1)
    value = tl.load(temperatures + row * temperature_stride + now)
    tl.store(temperature + at, tl.zeros((PLACES,), tl.float32) + value, mask=inside)
    high, low, word = philox_words(
        tl.load(seeds + row * stride),
        tl.load(seeds + row * stride + 1),
        place.to(tl.int64),
        done + 1,
        tl.load(canvas + row * stride),
        tl.load(attempt + row * stride),
    )
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    uniform = bits.to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    tl.store(uniforms + at, uniform, mask=inside)
    tl.store(fresh + at, (word.to(tl.int64) * vocab) >> 32, mask=inside)


STEP_NOISE = register(
    Kernel(
        "step_noise",
        _step_noise,
        {
            **dict.fromkeys(("seeds", "canvas", "attempt", "step", "max_steps"), "*i64"),
            "temperatures": "*fp32",
            "temperature": "*fp32",
            "uniforms": "*fp64",
            "fresh": "*i64",
            "width": "i32",
            "vocab": "i32",
            "stride": "i32",
            "temperature_stride": "i32",
        },
        {"PLACES": 256},
    )
)


def step_noise(
    seeds: Tensor,
    canvas: Tensor,
    attempt: Tensor,
    step: Tensor,
    max_steps: Tensor,
    temperatures: Tensor,
    width: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `step_noise`. The integers are parts of one record for each row."""
    rows = len(seeds)
    temperature = temperatures.new_empty(rows, width)
    uniforms = temperatures.new_empty(rows, width, dtype=torch.float64)
    fresh = seeds.new_empty(rows, width)
    launch(
        STEP_NOISE,
        (rows,),
        tile_for("step_noise", seeds.device),
        seeds.device,
        seeds=seeds,
        canvas=canvas,
        attempt=attempt,
        step=step,
        max_steps=max_steps,
        temperatures=temperatures,
        temperature=temperature,
        uniforms=uniforms,
        fresh=fresh,
        width=width,
        vocab=vocab_size,
        stride=seeds.stride(0),
        temperature_stride=temperatures.stride(0),
        PLACES=triton.next_power_of_2(width),
    )
    return temperature, uniforms, fresh


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


@triton.jit(
    do_not_specialize=[
        "tokens", "pinned", "history", "max_steps", "step", "unchanged", "cold", "converged",
        "done", "argmax", "drawn", "entropy", "top_ids", "top_probs", "fresh", "bound", "stability",
        "confidence", "words", "width", "stride", "flag_stride"
    ]
)  # fmt: skip
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

    The state as in `StepBatch`, rows `stride` int64 or `flag_stride` bytes apart; `HeadStats`
    [rows · width, …], fresh int64 [rows, width]; the rules as in `StaticRules.settings`.
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


@triton.jit(
    do_not_specialize=[
        "pinned", "hard_pins", "self_conditioning", "done", "width", "stride", "flag_stride"
    ]
)  # fmt: skip
def _take_soft(
    soft: tl.tensor, new: tl.tensor, pinned: tl.tensor, hard_pins: tl.tensor,
    self_conditioning: tl.tensor, done: tl.tensor, width: tl.tensor, stride: tl.tensor,
    flag_stride: tl.tensor,
    HIDDEN: tl.constexpr, ELEMENTS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """Takes a position's new soft embedding, unless it keeps the one that it has.  Grid: (rows ·
    width,).  soft and new [rows · width, HIDDEN]; the state as in `_move_rows`."""
    at = tl.program_id(0).to(tl.int64)
    row, flag = at // width, at // width * flag_stride
    fixed = tl.load(pinned + row * stride + at % width) >= 0
    kept = fixed & (tl.load(hard_pins + row * stride) > 0)
    kept |= tl.load(done + flag) != 0
    kept |= tl.load(self_conditioning + flag) == 0
    if kept:
        return
    for start in range(0, HIDDEN, ELEMENTS):
        column = start + tl.arange(0, ELEMENTS)
        within = column < HIDDEN
        value = tl.load(new + at * HIDDEN + column, mask=within, other=0.0)
        tl.store(soft + at * HIDDEN + column, value, mask=within)


_STATE = ("tokens", "pinned", "history", "max_steps", "step", "unchanged")
_FLAGS = ("cold", "converged", "done")
_STATISTICS = ("argmax", "drawn", "entropy", "top_ids", "top_probs")
_STRIDES = dict.fromkeys(("width", "stride", "flag_stride"), "i32")
_KEEPING = ("pinned", "hard_pins", "self_conditioning", "done")

MOVE_ROWS = register(
    Kernel(
        "move_rows",
        _move_rows,
        {
            **dict.fromkeys((*_STATE, "argmax", "drawn", "top_ids", "fresh", "stability"), "*i64"),
            **dict.fromkeys(_FLAGS, "*u1"),
            **dict.fromkeys(("entropy", "top_probs", "bound", "confidence"), "*fp32"),
            "words": "*i32",
            **_STRIDES,
        },
        {"HISTORY": 1, "TOP": 8, "PLACES": 256},
    )
)

TAKE_SOFT = register(
    Kernel(
        "take_soft",
        _take_soft,
        {
            **dict.fromkeys(("soft", "new"), "*bf16:16"),
            **dict.fromkeys(("pinned", "hard_pins"), "*i64"),
            **dict.fromkeys(("self_conditioning", "done"), "*u1"),
            **_STRIDES,
        },
        {"HIDDEN": 2816},
    )
)


def move_rows(
    rows: Any, rules: Any, stats: Any, fresh: Tensor, words: Tensor, mask: int | None = None
) -> None:
    """See `move_rows`. rows: a `StepBatch`; rules: with `settings`; stats: `HeadStats` of each of R
    · W positions; mask: None."""
    (count, width), device = rows.tokens.shape, words.device
    numbers = {name: getattr(stats, name).contiguous() for name in _STATISTICS}
    soft, fresh = stats.soft.contiguous(), fresh.contiguous()
    strides = {"stride": rows.tokens.stride(0), "flag_stride": rows.done.stride(0)}
    # First, since it reads which rows are done before this step; torch, if the second does not run,
    # writes the same again.
    launch(
        TAKE_SOFT,
        (count * width,),
        tile_for("take_soft", device),
        device,
        **{name: getattr(rows, name) for name in _KEEPING},
        **strides,
        soft=rows.soft,
        new=soft,
        width=width,
        HIDDEN=soft.shape[-1],
    )
    launch(
        MOVE_ROWS,
        (count,),
        tile_for("move_rows", device),
        device,
        **{name: getattr(rows, name) for name in (*_STATE, *_FLAGS)},
        **strides,
        **numbers,
        **rules.settings,
        fresh=fresh,
        words=words,
        width=width,
        HISTORY=rows.history.shape[1],
        TOP=stats.top_ids.shape[-1],
        PLACES=triton.next_power_of_2(width),
    )


def _serves(
    rows: Any, rules: Any, stats: Any, fresh: Tensor, words: Tensor, mask: int | None = None
) -> bool:
    """Whether the rules have settings, noise is random, and the parts of each row's state one
    distance to those of the next row's."""
    if mask is not None:
        return False
    integers = {getattr(rows, name).stride(0) for name in (*_STATE, "hard_pins")}
    flags = {getattr(rows, name).stride(0) for name in (*_FLAGS, "self_conditioning")}
    alone = len(rows.tokens) == 1  # of one row no next one is read
    apart = (alone or len(integers) == len(flags) == 1) and rows.soft.is_contiguous()
    alike = stats.soft.dtype == rows.soft.dtype and words.is_contiguous()
    return rules.settings is not None and apart and alike and rows.tokens.shape[1] <= MOST_PLACES


def _check(trial: Trial) -> None:
    """Two rows of four positions: the last one of the first row is pinned, the second row is
    done."""
    device, hidden = trial.device, trial.sizes.hidden
    record = torch.zeros(2, 16, dtype=torch.int64, device=device)
    flags = torch.zeros(2, 4, dtype=torch.bool, device=device)
    tokens, pinned, history = record[:, :4], record[:, 4:8], record[:, None, 8:12]
    names = ("max_steps", "hard_pins", "step", "unchanged", *_FLAGS, "self_conditioning")
    columns = dict(zip(names, (*record[:, 12:16].unbind(1), *flags.unbind(1)), strict=True))
    soft = torch.zeros(2, 4, hidden, dtype=trial.dtype, device=device)
    rows = SimpleNamespace(tokens=tokens, pinned=pinned, history=history, soft=soft, **columns)
    pinned.fill_(-1)
    pinned[0, 3] = 9
    rows.max_steps.fill_(5)
    rows.self_conditioning.fill_(True)
    rows.done[1] = True
    spread = torch.tensor([0.3, 0.1, 0.2, 0.5], device=device).repeat(2)
    settings = {
        "bound": torch.full((2,), 0.25, device=device),
        "stability": torch.ones(2, dtype=torch.int64, device=device),
        "confidence": torch.ones(2, device=device),
    }
    ids = torch.arange(1, 9, device=device)
    stats = SimpleNamespace(
        argmax=ids,
        drawn=ids + 10,
        entropy=spread,
        top_ids=ids[:, None],
        top_probs=spread[:, None],
        soft=torch.ones(8, hidden, dtype=trial.dtype, device=device),
    )
    words = torch.zeros(2, 22, dtype=torch.int32, device=device)
    move_rows(rows, SimpleNamespace(settings=settings), stats, ids.view(2, 4) + 20, words)
    # Before 0.3 come 0 (pinned), 0.1 and 0.2: their sum is over the bound.
    assert tokens.tolist() == [[21, 12, 13, 9], [0] * 4], "other tokens than those accepted"
    assert history[:, 0].tolist() == [[1, 2, 3, 9], [0] * 4], "another argmax canvas"
    assert soft.double().sum(dim=(1, 2)).tolist() == [4 * hidden, 0], "another soft embedding"
    assert rows.step.tolist() == [1, 0] and rows.done.tolist() == [False, True], "other states"
    assert words[0].tolist()[:6] == [1, 0, 1, 2, 3, 9] and int(words[1, 1]) & 8, "other words"


def _serves_noise(
    seeds: Tensor,
    canvas: Tensor,
    attempt: Tensor,
    step: Tensor,
    max_steps: Tensor,
    temperatures: Tensor,
    width: int,
    vocab_size: int,
) -> bool:
    apart = {each.stride(0) for each in (seeds, canvas, attempt, step, max_steps)}
    return len(seeds) == 1 or len(apart) == 1  # of one row no next one is read


def _check_noise(trial: Trial) -> None:
    """A row, and one that is done and has no next temperature."""
    first, second = [5, 7, 3, 1, 0, 2], [2**32 - 1, 2**31, 0, 0, 1, 1]
    device, vocabulary = trial.device, trial.sizes.vocabulary
    record = torch.tensor([first, second], device=device)
    table = torch.tensor([[0.5, 1.0], [0.25, 1.0]], device=device)
    canvas, attempt, step, limits = record[:, 2:].unbind(1)
    temperature, uniforms, fresh = step_noise(
        record[:, :2], canvas, attempt, step, limits, table, 3, vocabulary
    )
    assert temperature.tolist() == [[0.5] * 3, [0.25] * 3], "another temperature"
    for row, numbers in enumerate((first, second)):
        for position in range(3):
            counter = position, numbers[4] + 1, numbers[2], numbers[3]
            words = _philox(counter, (numbers[0], numbers[1]))
            uniform = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
            assert float(uniforms[row, position]) == uniform, "another uniform"
            assert int(fresh[row, position]) == words[2] * vocabulary >> 32, "another token"


def _philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's integers; see `diffusion.noise`."""
    most = 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        even = second >> 32 ^ counter[1] ^ key[0], first >> 32 ^ counter[3] ^ key[1]
        counter = even[0], second & most, even[1], first & most
        key = key[0] + 0x9E3779B9 & most, key[1] + 0xBB67AE85 & most
    return counter


TWINS = {
    "move_rows": KernelTwin("move_rows", move_rows, _serves, _check),
    "step_noise": KernelTwin("step_noise", step_noise, _serves_noise, _check_noise),
}
