"""How the rows of a step are laid out: the same at every step of the same rows.

Rows of one batch are a part of the step.  The forward and the pass over the vocabulary read packed
positions, part after part.  On a CPU, positions beyond a canvas's length are left out; elsewhere
they take part, so that shapes depend on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.scoring import Scoring
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.lifting import LiftProbe
from sfumato.diffusion.step.rules import RuleGroup
from sfumato.model.attention import CanvasPart
from sfumato.model.cache import KVPool, Slot


@dataclass(frozen=True)
class Part:
    """The rows of one batch that take part in a step, R of width W."""

    batch: StepBatch  # views of those rows
    lengths: tuple[int, ...]  # of each row's canvas
    packed: Tensor | None  # int64 [positions]: places in [R · W] that are read; None: all
    groups: tuple[RuleGroup, ...]

    @property
    def spans(self) -> list[int]:
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
class Run:
    """Neighbouring rows of a part whose slots are of one pool."""

    part: Part
    rows: slice
    packed: Tensor | None  # as in `Part`, of these rows alone

    def attended(self, pool: KVPool) -> CanvasPart:
        batch = self.part.batch
        return CanvasPart(
            pool, batch.slots[self.rows], batch.width, batch.length[self.rows], self.packed
        )


@dataclass(frozen=True)
class Layout:
    """The rows of a step, part after part."""

    order: tuple[int, ...]  # of each row, its place among the canvases of the caller
    parts: tuple[Part, ...]
    runs: tuple[Run, ...]
    scoring: Scoring

    @property
    def reads_progress(self) -> bool:
        """Whether scoring reads on the host how far a canvas has come: rows that ask for more than
        the plain distribution do."""
        return any(group.kind != "plain" for group in self.scoring.groups)

    def attended(self, slots: Sequence[Slot]) -> list[CanvasPart]:
        """What attention takes; slots: in the caller's order. Pools are not kept here: that of a
        larger slot goes with its request."""
        firsts = accumulate((run.rows.stop - run.rows.start for run in self.runs), initial=0)
        pools = [slots[self.order[row]].pool for row, _ in zip(firsts, self.runs, strict=False)]
        return [run.attended(pool) for run, pool in zip(self.runs, pools, strict=True)]


def lay_out(
    order: Sequence[int],
    batches: Sequence[tuple[StepBatch, Sequence[Canvas], Sequence[Slot]]],
    vocab_size: int,
    device: torch.device,
    probe: LiftProbe,
) -> Layout:
    """The layout of canvases that stand in the first rows of their batches. Notes there which
    slots they follow, and their lengths."""
    parts, runs = [], []
    for batch, canvases, slots in batches:
        rows = batch.first(len(canvases))
        rows.note(canvases, slots)
        lengths = [canvas.length for canvas in canvases]
        groups = RuleGroup.of(canvases, rows, probe)
        packed = _packed(lengths, batch.width, device)
        part = Part(rows, tuple(lengths), packed, groups)
        parts.append(part)
        for _, places in groupby(range(len(slots)), lambda row: id(slots[row].pool)):  # noqa: B023
            members = list(places)
            at = slice(members[0], members[-1] + 1)
            packed = None if part.packed is None else _packed(lengths[at], batch.width, device)
            runs.append(Run(part, at, packed))
    scored = [canvas for _, members, _ in batches for canvas in members]
    spans = [span for part in parts for span in part.spans]
    scoring = Scoring.of(scored, vocab_size, device, spans)
    return Layout(tuple(order), tuple(parts), tuple(runs), scoring)


def _packed(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    if device.type != "cpu" or all(length == width for length in lengths):
        return None
    rows = [torch.arange(length) + row * width for row, length in enumerate(lengths)]
    return torch.cat(rows)
