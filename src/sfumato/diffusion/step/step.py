"""One denoising step: draw, forward, score, update, pack, as functions of the state of batches.

`evaluate` draws, runs the forward and scores; it changes nothing. `move` says what the rules make
of that, and packs what the host is to learn into one tensor; it changes nothing either. `write`
takes the change into the batches in place. None of the three reads a value on the host, copies to
the device, or has a shape that depends on data. Exceptions are rows that ask for more than the
plain distribution (see `scoring.py`), and rules that cannot be lifted (see `rules.py`).

Rows of one batch are a part of the step.  The forward and the pass over the vocabulary read packed
positions, part after part.  On a CPU, positions beyond a canvas's length are left out; elsewhere
they take part, so that shapes depend on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from sfumato.diffusion.canvas import REVEALED, Canvas
from sfumato.diffusion.noise import step_noise
from sfumato.diffusion.sampler import StepView
from sfumato.diffusion.scoring import Scoring, score
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.rules import GroupedRules, LiftProbe, RuleGroup, StaticRules
from sfumato.model.cache import KVPool, Slot, adapters_of
from sfumato.model.head import PLAIN, HeadStats
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart
from sfumato.ops.registry import operation


@dataclass(frozen=True)
class Part:
    """The rows of one batch that take part in a step, R of width W."""

    batch: StepBatch  # views of those rows
    lengths: tuple[int, ...]  # of each row's canvas
    packed: Tensor | None  # int64 [positions]: places in [R · W] that are read; None: all
    rules: GroupedRules | StaticRules
    mask: int | None = None  # the token that is the noise; None: it is random

    @property
    def widths(self) -> list[int]:
        """Packed positions of each row."""
        return [self.batch.width] * len(self.lengths) if self.packed is None else [*self.lengths]

    def pack(self, values: Tensor) -> Tensor:
        """[R, W, ...] → [positions, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.packed is None else flat.index_select(0, self.packed)

    def unpack(self, values: Tensor) -> Tensor:
        """[positions, ...] → [R, W, ...], with zeros at positions that are not read."""
        batch = self.batch
        if self.packed is not None:
            room = values.new_zeros(batch.rows * batch.width, *values.shape[1:])
            values = room.index_copy_(0, self.packed, values)
        return values.unflatten(0, (batch.rows, batch.width))


@dataclass(frozen=True)
class Layout:
    """The rows of a step, part after part."""

    order: tuple[int, ...]  # of each row, its place among the canvases of the caller
    parts: tuple[Part, ...]
    # Of neighbouring rows of a part whose slots are of one pool: the place of one of them among the
    # canvases of the caller, and what makes of the pool what they see.
    runs: tuple[tuple[int, Callable[[KVPool], RowPart]], ...]
    scoring: Scoring

    def attended(self, slots: Sequence[Slot]) -> list[RowPart]:
        """What attention takes; slots: in the caller's order. Pools are not kept here: that of a
        larger slot goes with its request."""
        return [attended(slots[place].pool) for place, attended in self.runs]


def lay_out(
    order: Sequence[int],
    batches: Sequence[tuple[StepBatch, Sequence[Canvas], Sequence[Slot]]],
    vocab_size: int,
    device: torch.device,
    probe: LiftProbe,
    mask: int | None = None,
) -> Layout:
    """The layout of canvases that stand in the first rows of their batches; mask: the token that is
    their noise, None: it is random. Notes there which slots they follow, and their lengths."""
    parts, runs = [], list[tuple[int, Callable[[KVPool], RowPart]]]()
    places = iter(order)
    for batch, canvases, slots in batches:
        rows = batch.first(len(canvases))
        rows.note(canvases, slots)
        lengths = [canvas.length for canvas in canvases]
        groups = RuleGroup.of(canvases, rows, probe)
        packed = _packed(lengths, batch.width, device)
        part = Part(rows, tuple(lengths), packed, GroupedRules(groups), mask)
        parts.append(part)
        for _, alike in groupby(enumerate(slots), lambda each: id(each[1].pool)):
            members = [(row, next(places)) for row, _ in alike]
            at = slice(members[0][0], members[-1][0] + 1)
            packed = None if part.packed is None else _packed(lengths[at], batch.width, device)
            seen = partial(
                RowPart,
                slots=rows.slots[at],
                width=batch.width,
                lengths=rows.length[at],
                index=packed,
                adapters=adapters_of(slots[at]),
            )
            runs.append((members[0][1], seen))
    scored = [canvas for _, members, _ in batches for canvas in members]
    widths = [width for part in parts for width in part.widths]
    scoring = Scoring.of(scored, vocab_size, device, widths)
    return Layout(tuple(order), tuple(parts), tuple(runs), scoring)


def _packed(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    if device.type != "cpu" or all(length == width for length in lengths):
        return None
    rows = [torch.arange(length) + row * width for row, length in enumerate(lengths)]
    return torch.cat(rows)


Evaluated = tuple[HeadStats, dict[int, HeadStats], tuple[Tensor, ...]]
"""What draw, forward and score give, before any row is moved on: the statistics of all packed
positions, by row of all parts those of its own (see `score`), and of each part new tokens int64
[R, W]."""


def evaluate(
    network: Network,
    parts: Sequence[Part],
    scoring: Scoring,
    attend: PaddedRows | Tensor,
    canvases: Sequence[Canvas] = (),
    done: Tensor | None = None,
) -> Evaluated:
    """The first three parts of a step. attend: what the rows see, or the hidden states of the
    forward where that has been run; canvases and done: see `score`."""
    temperature, uniforms, fresh = draw(parts, network.config.vocab_size)
    hidden = attend if isinstance(attend, Tensor) else forward(network, parts, attend)
    expected = None  # of rows of fixed shape, none leaves out what their most probable tokens hold
    if canvases:
        expected = _joined([part.pack(part.batch.expected) for part in parts]) > 0
    inputs = hidden, temperature, uniforms
    stats, extra = score(network.head, *inputs, scoring, canvases, expected, done)
    return stats, extra, fresh


def move(parts: Sequence[Part], evaluated: Evaluated) -> tuple[list[Update], Tensor]:
    """What a step makes of each part, and the packed words of all parts, one part after another."""
    stats, of_rows, all_fresh = evaluated
    updates = []
    row = position = 0
    for part, fresh in zip(parts, all_fresh, strict=True):
        rows, positions = len(part.lengths), sum(part.widths)
        part_stats = stats if len(parts) == 1 else stats[position : position + positions]
        extra = {i - row: e for i, e in of_rows.items() if row <= i < row + rows}
        updates.append(update(part, part_stats, fresh, extra))
        row, position = row + rows, position + positions
    return updates, _joined([pack(new).flatten() for new in updates])


def write(parts: Sequence[Part], updates: Sequence[Update]) -> None:
    """Moves the rows on. Allocates nothing."""
    for part, new in zip(parts, updates, strict=True):
        apply_update(part.batch, new)


@operation
def move_rows(
    rows: StepBatch,
    rules: StaticRules,
    stats: HeadStats,
    fresh: Tensor,
    words: Tensor,
    mask: int | None = None,
) -> None:
    """Moves rows one step on, in place, and packs what the host is to learn.

    stats: of all positions of the rows, [R · W, ...]; fresh: new tokens int64 [R, W]; words int32
    [R, words], which are overwritten; mask: see `Part`.  A row that is done stays as it is.
    """
    part = Part(rows, (), None, rules, mask)
    new = update(part, stats, fresh, {})
    words.copy_(pack(new))
    write([part], [new])


def draw(parts: Sequence[Part], vocab_size: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """What the step to come is drawn with: temperatures float32 and uniforms float64 [positions],
    packed, and of each part new tokens int64 [R, W]."""
    temperatures, uniforms, fresh = [], [], []
    for part in parts:
        batch = part.batch
        counters = batch.canvas, batch.attempt, batch.step, batch.max_steps
        temperature, uniform, tokens = step_noise(
            batch.seeds, *counters, batch.temperatures, batch.width, vocab_size
        )
        temperatures.append(part.pack(temperature))
        uniforms.append(part.pack(uniform))
        fresh.append(tokens if part.mask is None else tokens.fill_(part.mask))
    return _joined(temperatures), _joined(uniforms), tuple(fresh)


def forward(network: Network, parts: Sequence[Part], attend: PaddedRows) -> Tensor:
    """Hidden states [positions, hidden], packed. Before a row's first step its soft embedding is
    zeros, which give what none gives: whether there is one is not asked on the host."""
    tokens = _joined([part.pack(part.batch.tokens) for part in parts])
    soft = _joined([part.pack(part.batch.soft) for part in parts])
    return network.denoise_batch(tokens, soft, attend)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class Update:
    """What a step makes of a batch, before anything is written."""

    tokens: Tensor  # int64 [R, W]
    soft: Tensor  # [R, W, hidden]
    history: Tensor  # int64 [R, H, W]
    unchanged: Tensor  # int64 [R]
    frozen: Tensor  # bool [R]: rows that were done before the step, and stay as they are
    keeps_soft: Tensor  # bool [R, W, 1]: positions whose soft embedding stays as it is
    expected: Tensor  # int32 [R, W]: as in the batch
    step: Tensor  # int64 [R]: after the step, as the next two
    converged: Tensor  # bool [R]
    done: Tensor  # bool [R]
    entropy: Tensor  # float32 [R, W], pinned positions without
    accepted: Tensor  # bool [R, W]
    top_ids: Tensor  # int64 [R, W, top]
    top_probs: Tensor  # float32 [R, W, top]
    errors: dict[int, Exception]  # by row: what its rules raised


def update(part: Part, stats: HeadStats, fresh: Tensor, extra: Mapping[int, HeadStats]) -> Update:
    """What the rules make of a part's packed statistics; extra: see `GroupedRules`."""
    batch, suffices = part.batch, stats.top_suffices
    pinned = batch.pinned >= 0
    # A token that has taken a mask's place stays.
    fixed = pinned if part.mask is None else pinned | (batch.tokens != part.mask)
    stats = _with_fixed(part, stats, fixed)
    # Of -1 before the first step, which equals no token.
    same = (stats.argmax == batch.history[:, -1]).all(dim=1)
    # Copies of what is about to be overwritten: a rule may keep its view.
    view = StepView(
        batch.step + 1,
        0,
        batch.tokens.clone(),
        stats,
        batch.history.clone(),
        fixed,
        torch.where(same, batch.unchanged + 1, 0),
        _least(part),
    )
    accepted, stop, errors = part.rules.decide(view, extra)
    accepted, argmax = accepted | fixed, stats.argmax
    frozen = batch.done.clone()
    step = batch.step + ~frozen
    if part.mask is not None:
        # What a grammar has left few tokens for is drawn among these, and stays.
        accepted = accepted | (batch.pinned == REVEALED)
        stop = stop | accepted.all(dim=1)
        # The last step reveals what is left.
        accepted = accepted | (stop | (step >= batch.max_steps))[:, None]
        argmax = torch.where(accepted, stats.drawn, argmax)
    converged = batch.converged | (stop & ~frozen)
    bare = pinned & (batch.hard_pins > 0)[:, None]
    keeps_soft = (frozen | ~batch.self_conditioning)[:, None] | bare
    return Update(
        tokens=torch.where(accepted, stats.drawn, fresh),
        soft=stats.soft,
        history=torch.cat((view.history[:, 1:], argmax[:, None]), dim=1),
        unchanged=view.unchanged,
        frozen=frozen,
        keeps_soft=keeps_soft[:, :, None],
        expected=batch.expected if suffices is None else part.unpack(suffices.int()),
        step=step,
        converged=converged,
        done=frozen | converged | (step >= batch.max_steps),
        entropy=stats.entropy,
        accepted=accepted,
        top_ids=stats.top_ids,
        top_probs=stats.top_probs,
        errors=errors,
    )


def _with_fixed(part: Part, stats: HeadStats, fixed: Tensor) -> HeadStats:
    """A part's statistics [R, W, ...] of packed ones, with the tokens of the positions that are
    fixed, bool [R, W], and with the argmax as the draw where the row's temperature is 0."""
    batch = part.batch
    stats = HeadStats(*(part.unpack(getattr(stats, name)) for name in PLAIN))
    tokens = batch.pinned if part.mask is None else batch.tokens
    cold = batch.cold[:, None]
    drawn = torch.where(cold, stats.argmax, stats.drawn)
    probs = torch.where(cold, stats.top_probs[..., 0], stats.drawn_probs)
    return replace(
        stats,
        argmax=torch.where(fixed, tokens, stats.argmax),
        drawn=torch.where(fixed, tokens, drawn),
        entropy=stats.entropy.masked_fill(fixed, 0.0),
        drawn_probs=probs.masked_fill(fixed, 1.0),
    )


def _least(part: Part) -> Tensor:
    """int64 [R]: see `StepView`."""
    pace = part.batch.pace
    if part.mask is None:
        return pace[:, 0].long()
    now = part.batch.step.clamp(max=pace.shape[1] - 1)
    return pace.gather(1, now[:, None])[:, 0].long()


def apply_update(batch: StepBatch, new: Update) -> None:
    """Takes a step's change into the rows that are not done. Allocates nothing: once it has begun,
    want of memory cannot end it halfway."""
    frozen = new.frozen[:, None]
    torch.where(frozen, batch.tokens, new.tokens, out=batch.tokens)
    torch.where(new.keeps_soft, batch.soft, new.soft, out=batch.soft)
    torch.where(frozen[:, None], batch.history, new.history, out=batch.history)
    torch.where(new.frozen, batch.unchanged, new.unchanged, out=batch.unchanged)
    if new.expected is not batch.expected:
        torch.where(frozen, batch.expected, new.expected, out=batch.expected)
    batch.step.copy_(new.step)
    batch.converged.copy_(new.converged)
    batch.done.copy_(new.done)


DONE, CONVERGED, NOT_FINITE, FROZEN = 1, 2, 4, 8
"""Flags of a row. FROZEN: it was done before the step, which changed nothing in it."""
HEADER = 2  # words of a row before those of its positions: steps done, flags


def pack(new: Update) -> Tensor:
    """int32 [R, words] of a step; `unpack` reads them. Token ids fit 32 bits; floats are carried as
    their bits. Of a row that was done before, only the flag FROZEN counts."""
    flags = (
        new.done * DONE
        + new.converged * CONVERGED
        + (~new.entropy.isfinite()).any(dim=1) * NOT_FINITE
        + new.frozen * FROZEN
    )
    return torch.cat(
        (
            torch.stack((new.step, flags), dim=1).int(),
            new.history[:, -1].int(),
            new.entropy.view(torch.int32),
            new.accepted.int(),
            new.top_ids.flatten(1).int(),
            new.top_probs.contiguous().view(torch.int32).flatten(1),
        ),
        dim=1,
    )


def row_words(width: int, top: int) -> int:
    """The words of a row; top: most probable tokens of a position."""
    return HEADER + width * (3 + 2 * top)


RowResult = tuple[int, int, Tensor, Tensor, Tensor, Tensor, Tensor]
"""A row of a packed step on the host: steps done, flags, argmax int64 [W], entropy float32 [W],
accepted bool [W], the most probable tokens int64 [W, top] and their probabilities float32."""


def unpack(words: Tensor, rows: int, width: int) -> Iterator[RowResult]:
    """The rows of one part. words: int32, those of the part, on the host."""
    words = words.view(rows, -1)
    steps, flags = words[:, :HEADER].t().tolist()
    top = ((words.shape[1] - HEADER) // width - 3) // 2
    argmax, entropy, accepted, ids, probs = words[:, HEADER:].split(
        (width, width, width, top * width, top * width), dim=1
    )
    return zip(
        steps,
        flags,
        argmax.long(),
        entropy.contiguous().view(torch.float32),
        accepted.bool(),
        ids.long().unflatten(1, (width, top)),
        probs.contiguous().view(torch.float32).unflatten(1, (width, top)),
        strict=True,
    )
