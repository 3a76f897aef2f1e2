"""The vocabulary head: one pass over chunks of the embedding, three kernels for each, one at last.

A chunk is multiplied, and its scores, masses and statistics written; then its masses are multiplied
by the same rows of the embedding, and its best scores kept.  Of the 26B-A4B these rows are 46 MB,
and scores and masses 13 MB with 256 positions and 50 MB with GROUP, so most caches hold a part of
them: count two reads of the embedding for each GROUP of positions.  From some hundred positions on
both reads take less time than the products.  What is kept for the whole vocabulary is one highest
score, mass and moment for each BLOCK ids.

What a decision asks of the vocabulary, the scores of given tokens and the mass of all, leaves out
the draw and the soft embedding, and so the second product; the tokens' scores are products with
their rows of the embedding alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.online_softmax import BLOCK, TOP, Bans
from sfumato.ops.triton.head_kernels import (
    BLOCK_STATISTICS,
    EMBED_CHUNK,
    FINISH_HEAD,
    MERGE_TOP,
    SCORE_CHUNK,
)
from sfumato.ops.triton.kernel import Kernel, launch
from sfumato.ops.triton.operands import elementwise, matrix, multiplies
from sfumato.ops.triton.planes import PlaneTensor, takes
from sfumato.ops.triton.self_test import Trial, assert_near, twins_of, whole_blocks
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import BF16, of_forms, operand, plane_rows
from sfumato.ops.triton.workspaces import CHUNK, GROUP, head_chunk
from sfumato.weights.formats import ScaledTensor

MOST_BANS = 64  # of a row; each is compared with every id


@dataclass(frozen=True)
class HeadResult:
    """What a pass gives of each position, as `HeadStats`."""

    argmax: Tensor  # int64 [positions]
    drawn: Tensor  # int64 [positions]
    drawn_probs: Tensor  # float32 [positions]
    entropy: Tensor  # float32 [positions]
    top_ids: Tensor  # int64 [positions, TOP]
    top_probs: Tensor  # float32 [positions, TOP]
    soft: Tensor  # [positions, hidden], in the dtype of the hidden states
    peak: Tensor  # float32 [positions]: the highest score
    total: Tensor  # float32 [positions]: Σ e^(score - peak)

    @classmethod
    def empty(cls, hidden: Tensor) -> HeadResult:
        count, device = len(hidden), hidden.device
        ids = torch.empty(count, dtype=torch.int64, device=device)
        numbers = torch.empty(count, device=device)
        return cls(
            ids,
            torch.empty_like(ids),
            torch.empty_like(numbers),
            numbers,
            torch.empty(count, TOP, dtype=torch.int64, device=device),
            torch.empty(count, TOP, device=device),
            torch.empty_like(hidden),
            *torch.empty(2, count, device=device).unbind(),
        )

    def part(self, at: slice) -> HeadResult:
        """Some positions: views."""
        return HeadResult(*(each[at] for each in vars(self).values()))


def vocabulary_head(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    temperature: Tensor,
    uniform: Tensor,
    softcap: float,
    bans: Bans | None = None,
    done: Tensor | None = None,
    masses: bool = True,
) -> HeadResult:
    """One pass over the vocabulary; see `model.head.VocabularyHead`.

    hidden [positions, size] and weight [vocab, size] of one dtype, or planes; temperature float32
    and uniform float64 [positions]; done bool [positions]: of rows that are done, whose results are
    zeros.
    masses: whether the draw, the most probable tokens and the soft embedding are asked for.
    """
    result = HeadResult.empty(hidden)
    if done is None:
        done = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    for start in range(0, len(hidden), GROUP):
        at = slice(start, start + GROUP)
        banned = bans and replace(bans, row=bans.row[at], place=bans.place[at])
        # Unnamed, so that a part's memory is free for the next one.
        _Pass(hidden[at], weight, temperature[at], done[at], softcap, banned, masses).run(
            uniform[at], result.part(at)
        )
    return result


def vocabulary_pass(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    temperature: Tensor,
    uniform: Tensor,
    softcap: float,
    bans: Bans | None,
    chunk: int,
    packed: object,
    done: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See `vocabulary_pass`."""
    out = vocabulary_head(hidden, weight, temperature, uniform, softcap, bans, done)
    named = min(TOP, weight.shape[0])
    top_ids, top_probs = out.top_ids[:, :named], out.top_probs[:, :named]
    return out.argmax, out.drawn, out.entropy, top_ids, top_probs, out.soft, out.drawn_probs


class _Pass:
    """A pass for at most GROUP positions; see `vocabulary_head`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor | PlaneTensor,
        temperature: Tensor,
        done: Tensor,
        softcap: float,
        bans: Bans | None,
        masses: bool,
    ) -> None:
        self.hidden, self.operand = hidden.contiguous(), operand(weight)
        self.vocab, self.size = weight.shape
        self.masses, self.device = masses, hidden.device
        self.positions, self.blocks = len(hidden), triton.cdiv(self.vocab, BLOCK)
        self.chunk = head_chunk(self.vocab)
        # What the kernels of scores and of the end take; the one of a chunk's masses takes a part.
        self.both: dict[str, Any] = {
            "temperature": temperature.float().contiguous(),
            "blocks": self.blocks,
            "softcap": softcap,
            "MASSES": masses,
            "bans": 0 if bans is None else bans.ids.shape[1],
        }
        nothing = torch.empty(0, dtype=torch.int64, device=hidden.device)
        for name in ("ids", "limits", "row", "place"):
            self.both[f"ban_{name}"] = getattr(bans, name, nothing).contiguous()
        self.every: dict[str, Any] = {
            "done": done.contiguous(),
            "vocab": self.vocab,
            "positions": self.positions,
            "HIDDEN": self.size,
        }
        self.score = SCORE_CHUNK[self.operand.form]
        self.embed = EMBED_CHUNK[self.operand.form]
        self.finish = FINISH_HEAD[self.operand.form]
        self.score_tile = tile_for(self.score.name, self.device)
        self.embed_tile = tile_for(self.embed.name, self.device)
        assert self.score_tile["TILE"] == self.embed_tile["TILE"]
        self._allocate()

    def _allocate(self) -> None:
        count, device, tile = self.positions, self.device, self.score_tile["TILE"]
        chunk = self.chunk if self.masses else tile  # is not written
        numbers = torch.empty(3, count, self.blocks, device=device)
        best = torch.empty(count, self.blocks, dtype=torch.int8, device=device)
        self.statistics = dict(zip(BLOCK_STATISTICS, (*numbers, best), strict=True))
        kept = count if self.masses else 1
        self.chunk_tensors = {
            "scores": torch.empty(kept, chunk, device=device),
            "masses": torch.empty(kept, chunk, dtype=self.hidden.dtype, device=device),
            "tile_max": torch.empty(kept, chunk // tile, device=device),
        }
        self.top = {
            "top": torch.empty(kept, TOP, device=device),
            "top_ids": torch.empty(kept, TOP, dtype=torch.int32, device=device),
        }
        self.soft = torch.empty(self.embed_tile["SPLITS"], kept, self.size, device=device)
        self.peaks = torch.empty(2, kept, device=device)

    def run(self, uniform: Tensor, result: HeadResult) -> None:
        """Writes the result; uniform float64 [positions]."""
        for first_id in range(0, self.vocab, self.chunk):
            self._score(first_id)
            if self.masses:
                self._embed(first_id)
        self._finish(uniform, result)

    def _score(self, first_id: int) -> None:
        tile = self.score_tile
        ids = min(self.chunk, self.vocab - first_id)
        launch(
            self.score,
            (triton.cdiv(ids, tile["TILE"]), triton.cdiv(self.positions, tile["POSITIONS"])),
            tile,
            self.device,
            hidden=matrix(self.hidden, tile["POSITIONS"], tile["DEPTH"]),
            **self.operand.stored(tile["TILE"], tile["DEPTH"]),
            **self.every,
            **self.both,
            **self.chunk_tensors,
            **self.statistics,
            first_id=first_id,
            CHUNK=self.chunk,
        )

    def _embed(self, first_id: int) -> None:
        tile, chunk = self.embed_tile, self.chunk_tensors
        launch(
            self.embed,
            (
                triton.cdiv(self.size, tile["COLUMNS"]),
                tile["SPLITS"],
                triton.cdiv(self.positions, tile["POSITIONS"]),
            ),
            tile,
            self.device,
            **self.operand.stored(tile["TILE"], tile["COLUMNS"]),
            **self.every,
            peaks=self.peaks,
            masses=chunk["masses"],
            tile_max=chunk["tile_max"],
            soft=self.soft,
            first_id=first_id,
            CHUNK=self.chunk,
        )
        launch(
            MERGE_TOP,
            (self.positions,),
            tile_for("merge_top", self.device),
            self.device,
            **self.top,
            scores=chunk["scores"],
            tile_max=chunk["tile_max"],
            done=self.every["done"],
            first_id=first_id,
            vocab=self.vocab,
            CHUNK=self.chunk,
            TILE=tile["TILE"],
            TOP=TOP,
        )

    def _finish(self, uniform: Tensor, result: HeadResult) -> None:
        tile = tile_for(self.finish.name, self.device)
        launch(
            self.finish,
            (self.positions,),
            tile,
            self.device,
            hidden=self.hidden,
            **self.operand.stored(BLOCK, tile["DEPTH"]),
            **self.every,
            **self.both,
            **self.statistics,
            **self.top,
            soft=self.soft,
            uniform=uniform.contiguous(),
            argmax=result.argmax,
            drawn=result.drawn,
            drawn_probs=result.drawn_probs,
            entropy=result.entropy,
            peaks=result.peak,
            totals=result.total,
            out_ids=result.top_ids,
            out_probs=result.top_probs,
            out_soft=result.soft,
            root=self.size**0.5,
            BLOCKS=triton.next_power_of_2(self.blocks),
            SPLITS=self.embed_tile["SPLITS"],
            TOP=TOP,
        )


@triton.jit
def weight_rows(
    weight: tl.tensor, row: tl.tensor, first: tl.tensor, listed: tl.tensor, rows: tl.tensor,
    COLUMNS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """DEPTH columns from `first` on of gathered rows of a weight [rows, COLUMNS], float32 [IDS,
    DEPTH]; zeros where not `listed` and past the last column."""
    at = row.to(tl.int64)
    if FORMAT == BF16:
        column = first + tl.arange(0, DEPTH)
        seen = listed[:, None] & (column < COLUMNS)[None, :]
        numbers = tl.load(weight + at[:, None] * COLUMNS + column[None, :], mask=seen, other=0.0)
        return numbers.to(tl.float32)
    else:
        return plane_rows(weight, at, listed, first, rows, COLUMNS, IDS, DEPTH, FORMAT)


@triton.jit(do_not_specialize=["ids", "out", "count", "vocab"])
def _listed_scores(
    hidden: tl.tensor, weight: tl.tensor, ids: tl.tensor, out: tl.tensor, count: tl.tensor,
    vocab: tl.tensor, HIDDEN: tl.constexpr, FORMAT: tl.constexpr, IDS: tl.constexpr,
    DEPTH: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """Products of a position with IDS of its tokens.  Grid: (positions, ⌈count / IDS⌉)."""
    position = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * IDS + tl.arange(0, IDS)
    listed = place < count
    row = tl.load(ids + position * count + place, mask=listed, other=0)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((IDS, DEPTH), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        column = start + depth
        within = column < HIDDEN
        rows = weight_rows(weight, row, start, listed, vocab, HIDDEN, IDS, DEPTH, FORMAT)
        states = tl.load(hidden + position * HIDDEN + column, mask=within, other=0.0)
        sums += rows * states.to(tl.float32)[None, :]
    score = tl.sum(sums, axis=1)
    tl.store(out + position * count + place, score.to(out.dtype.element_ty), mask=listed)


LISTED_SCORES = of_forms(
    Kernel(
        "listed_scores",
        _listed_scores,
        {
            "hidden": "*fp32:16",
            "weight": "*bf16:16",
            "ids": "*i64",
            "out": "*fp32",
            "count": "i32",
            "vocab": "i32",
        },
        {"HIDDEN": 2816, "FORMAT": 0},
    ),
    *("HIDDEN", "Q6_K"),
)


def own_scores(hidden: Tensor, weight: Tensor | PlaneTensor, ids: Tensor) -> Tensor:
    """Products of each position with the rows that its ids name, summed in float32; see
    `ops.own_scores`. Rows in planes are unpacked in registers, and not rounded."""
    positions, count = ids.shape
    out = hidden.new_empty(positions, count)
    held = operand(weight)
    kernel = LISTED_SCORES[held.form]
    tile = tile_for(kernel.name, hidden.device)
    launch(
        kernel,
        (positions, triton.cdiv(count, tile["IDS"])),
        tile,
        hidden.device,
        hidden=hidden.contiguous(),
        weight=held.numbers,
        ids=ids.contiguous(),
        out=out,
        count=count,
        vocab=weight.shape[0],
        HIDDEN=hidden.shape[1],
        FORMAT=held.number,
    )
    return out


def vocabulary_mass(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `vocabulary_mass`. Both products are summed in float32 and not rounded, so that the
    mass of all tokens is 1."""
    ones = torch.ones(len(hidden), device=hidden.device)
    out = vocabulary_head(hidden, weight, ones, ones.double(), softcap, masses=False)
    scores = own_scores(hidden.float(), weight, ids)
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    return scores, out.peak, out.total, out.argmax


def _serves(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    temperature: Tensor,
    uniform: Tensor,
    softcap: float,
    bans: Bans | None,
    chunk: int,
    packed: object,
    done: Tensor | None = None,
) -> bool:
    fits = bans is None or bans.ids.shape[1] <= MOST_BANS
    return fits and packed is None and multiplies(hidden, weight)


def _serves_mass(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: object,
) -> bool:
    return packed is None and multiplies(hidden, weight)


def _head_of(format: str, trial: Trial, count: int) -> tuple[Tensor, Tensor | PlaneTensor]:
    """Positions, whose scores have a deviation of 8 or 3, and the whole vocabulary: it ends within
    a chunk."""
    columns = whole_blocks(format, trial.sizes.hidden)
    (hidden,) = trial.random((count, columns))
    weight = trial.weight(format, trial.sizes.vocabulary, columns)
    assert not isinstance(weight, ScaledTensor)
    return hidden * (3 if format else 8), weight


def _scores(hidden: Tensor, weight: Tensor | PlaneTensor, dtype: torch.dtype) -> Tensor:
    """The scores of all tokens, with a cap of 30, in float64 or as torch computes them in the dtype
    of hidden: products of that dtype, all else in float32. A chunk at a time: float64 of the whole
    weight would take 6 GB."""
    parts = (weight[a : a + CHUNK] for a in range(0, weight.shape[0], CHUNK))
    given = hidden.to(dtype)
    products = [given @ part.to(hidden.dtype).to(dtype).T for part in parts]
    wide = torch.promote_types(dtype, torch.float32)
    return (torch.cat(products, 1).to(wide) / 30).tanh() * 30


def _soft(share: Tensor, weight: Tensor | PlaneTensor, kept: torch.dtype) -> Tensor:
    """The mean of the rows by their shares, times the root of their length, in the dtype of the
    shares."""
    total = share.new_zeros(len(share), weight.shape[1])
    for a in range(0, weight.shape[0], CHUNK):
        total += share[:, a : a + CHUNK] @ weight[a : a + CHUNK].to(kept).to(share.dtype)
    return total * weight.shape[1] ** 0.5


def _check(format: str, trial: Trial) -> None:
    """The right numbers by float64. The third position is done."""
    hidden, weight = _head_of(format, trial, 3)
    dtype, device, vocab = hidden.dtype, hidden.device, weight.shape[0]
    temperature = torch.tensor([0.5, 1.0, 1.0], device=device)
    uniform = torch.tensor([0.4, 0.9, 0.9], dtype=torch.float64, device=device)
    done = torch.arange(3, device=device) == 2
    every = vocabulary_head(hidden, weight, temperature, uniform, 30.0, None, done)
    assert not every.soft[2].any(), "what is done is not zero"
    out = every.part(slice(2))
    hidden, temperature, uniform = hidden[:2], temperature[:2], uniform[:2]
    exact, plain = (
        (_scores(hidden, weight, kind) / temperature[:, None]).softmax(dim=1)
        for kind in (torch.float64, dtype)
    )
    assert torch.equal(out.argmax, exact.argmax(dim=1)), "another token is the most probable"
    drawn = out.drawn.clamp(0, vocab - 1)
    ends = exact.cumsum(dim=1)
    low, high = ((ends - at * exact).gather(1, drawn[:, None])[:, 0] for at in (1, 0))
    inside = (low - 1e-4 <= uniform) & (uniform <= high + 1e-4) & (drawn == out.drawn)
    assert bool(inside.all()), "a wrong draw"
    for result, of in (
        (out.entropy, lambda share: -torch.special.xlogy(share, share).sum(dim=1)),
        (out.top_probs, lambda share: share.topk(TOP, dim=1)[0]),
        (out.drawn_probs, lambda share: share.gather(1, drawn[:, None])[:, 0]),
        (out.soft, lambda share: _soft(share, weight, dtype)),
    ):
        assert_near(result, of(plain).to(result.dtype), of(exact))


def _check_mass(format: str, trial: Trial) -> None:
    """The right numbers by float64."""
    hidden, weight = _head_of(format, trial, 2)
    ids = 5 * torch.arange(38, device=trial.device).view(2, 19)  # of few, the norm would be chance
    scores, peak, total, argmax = vocabulary_mass(hidden, weight, ids, 30.0, 0, None)
    exact, plain = (_scores(hidden, weight, kind) for kind in (torch.float64, hidden.dtype))
    assert torch.equal(argmax, exact.argmax(dim=1)), "another token is the most probable"
    assert_near(scores, plain.gather(1, ids), exact.gather(1, ids))
    assert_near(peak + total.log(), plain.logsumexp(dim=1), exact.logsumexp(dim=1))


def _serves_own(hidden: Tensor, weight: Tensor | PlaneTensor, ids: Tensor) -> bool:
    floats = [weight] if isinstance(weight, Tensor) else []
    return takes(weight) and elementwise(hidden, *floats)


def _check_own(format: str, trial: Trial) -> None:
    """The last rows of the vocabulary."""
    hidden, weight = _head_of(format, trial, 2)
    ids = torch.arange(38, device=trial.device).view(2, 19)
    last = ids + weight.shape[0] - 38
    rows = weight.index_select(0, last.flatten())
    torchs, exact = (
        reference.own_scores.reference(hidden.to(wide), rows.to(wide), ids)
        for wide in (torch.float32, torch.float64)
    )
    assert_near(own_scores(hidden.float(), weight, last), torchs, exact)


TWINS = {
    **twins_of("vocabulary_pass", vocabulary_pass, _serves, _check),
    **twins_of("own_scores", own_scores, _serves_own, _check_own),
    **twins_of("vocabulary_mass", vocabulary_mass, _serves_mass, _check_mass),
}
