"""The host's side of a step: canvases take their rows, and learn what a step made of them.

`Denoiser.forward` moves no canvas on and may be repeated; `apply` moves the rows on where their
state lives and starts the copy to the host; `Pending.results` waits for that copy, which may be
some steps later.  Where steps are captured, `launch` does both at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step.batch import BatchRows, Commit, Key, RowsState, StepBatch, width_for
from sfumato.diffusion.step.captured import BatchForward, DeviceStep, StepKind, obstacle
from sfumato.diffusion.step.graphs import GraphBackend, StepGraphs
from sfumato.diffusion.step.rules import LiftProbe
from sfumato.diffusion.step.step import (
    CONVERGED,
    DONE,
    FROZEN,
    NOT_FINITE,
    Evaluated,
    Layout,
    RowResult,
    evaluate,
    lay_out,
    move,
    row_words,
    unpack,
    write,
)
from sfumato.model.cache import KVPool, Slot
from sfumato.model.devices import to_host
from sfumato.model.head import HeadStats
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows
from sfumato.ops.online_softmax import TOP

log = logging.getLogger(__name__)

Result = Draft | Exception | None
"""None: the row was done before the step, which changed nothing in it."""

Top = tuple[Tensor, Tensor, Tensor | None]
"""Ids int64 [length, top] and probabilities float32 [length, top] of the most probable tokens, and
log probabilities float32 [length, n] of n named ones, if any."""


@dataclass(eq=False)
class Pending:
    """A step that has been written, and of which the host may have learned nothing yet: what it
    will learn is on its way, and nothing of that is on the device."""

    canvases: tuple[Canvas, ...]  # in the layout's order
    order: tuple[int, ...]  # of each canvas, its place among those of the caller
    shapes: tuple[tuple[int, int], ...]  # rows and width of each part
    errors: tuple[dict[int, Exception], ...]  # of each part, by row: what its rules raised
    extra: dict[int, Top]  # by row in the layout's order: of rows that asked for more tokens
    top: int  # most probable tokens of each position
    words: Tensor  # of all parts, on the host
    copied: torch.Event | None  # None: `words` can be read at once
    outstanding: list[Pending]  # has this one until its results are there
    failure: Exception | None = None  # what the writing raised
    _results: list[Result] | None = None

    def __post_init__(self) -> None:
        self.outstanding.append(self)

    def results(self) -> list[Result]:
        """The draft of each canvas, or what failed in it, in the order of `forward`. Raises
        nothing: the rows have been moved on, and may not be stepped again in place of this step."""
        if self._results is None:
            try:
                self._results = self._read()
            except Exception as error:
                self._results = [error] * len(self.order)
            self.outstanding.remove(self)
        return self._results

    def _read(self) -> list[Result]:
        """The results in the caller's order, once the copy has arrived."""
        if self.failure is not None:
            raise self.failure
        if self.copied is not None:
            self.copied.synchronize()
        results: list[Result] = [None] * len(self.order)
        sizes = [rows * row_words(width, self.top) for rows, width in self.shapes]
        at = 0
        for shape, errors, words in zip(
            self.shapes, self.errors, self.words.split(sizes), strict=True
        ):
            for row, result in enumerate(unpack(words, *shape)):
                results[self.order[at]] = _result(
                    self.canvases[at], result, errors.get(row), self.extra.get(at)
                )
                at += 1
        return results


def _top_of(stats: HeadStats) -> Top:
    """On the host."""
    named = None if stats.named is None else stats.named.cpu()
    return stats.top_ids.cpu(), stats.top_probs.cpu(), named


def _result(canvas: Canvas, row: RowResult, error: Exception | None, top: Top | None) -> Result:
    """Tells a canvas what became of its row. error: what its rules raised."""
    step, flags, *positions = row
    argmax, entropy, accepted, top_ids, top_probs = (each[: canvas.length] for each in positions)
    if flags & FROZEN:
        return None
    if error is not None:
        return error
    if flags & NOT_FINITE:
        try:
            canvas.check_entropy(entropy, step)
        except (ValueError, FloatingPointError) as not_finite:
            return not_finite
    canvas.learn(step, bool(flags & CONVERGED), bool(flags & DONE))
    assert canvas.config.max_steps
    ids, probs, named = top or (top_ids, top_probs, None)
    return Draft(
        canvas.noise.canvas,
        canvas.step,
        argmax,
        entropy,
        accepted,
        canvas.config.max_steps,
        ids,
        probs,
        canvas.begun if canvas.step == 1 else None,
        named=named,
    )


@dataclass(frozen=True)
class ForwardResult:
    """What a forward gives, before any canvas is moved on."""

    evaluated: Evaluated
    layout: Layout
    canvases: tuple[Canvas, ...]  # in the layout's order
    batch_rows: tuple[tuple[BatchRows, RowsState], ...]  # of all parts, as they were at the forward


_Addresses = tuple[tuple[int, int, int], ...]
_Version = tuple[int, _Addresses]


def _addresses(slots: Sequence[Slot]) -> _Addresses:
    """Which slots these are, with the adapter of each."""
    return tuple((id(slot.pool), slot.index, slot.adapter) for slot in slots)


class Denoiser:
    """Steps canvases of one network. Not for several threads at a time."""

    def __init__(self, network: Network, rows: int, backend: GraphBackend | None = None) -> None:
        """rows: for how many a batch has room at first; backend: captures steps for `launch`."""
        self.network, self._rows = network, rows
        self._batch_rows: dict[Key, BatchRows] = {}
        self._layout: tuple[object, Layout] | None = None
        self._probe = LiftProbe()
        self._outstanding: list[Pending] = []  # written steps of which the host has learned nothing
        self.graphs = None if backend is None else StepGraphs(backend, rows)
        self._prepared: dict[BatchRows, tuple[_Version, DeviceStep]] = {}
        self._logged: set[str] = set()

    @torch.no_grad()
    def forward(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> ForwardResult:
        """One forward of the canvases; canvases[i] follows the prefix that slots[i] holds.

        Waits for the results of earlier steps only where a row asks for more than the plain
        distribution: what scores such a row reads on the host how far its canvas has come.
        """
        layout = self._lay_out(canvases, slots)
        if any(group.kind != "plain" for group in layout.scoring.groups):
            for pending in list(self._outstanding):
                pending.results()
        ordered = tuple(canvases[i] for i in layout.order)
        batch_rows = [self._batch_rows[key] for key in dict.fromkeys(map(self._key, ordered))]
        states = tuple((each, each.state) for each in batch_rows)
        attended = layout.attended(slots)
        attend: PaddedRows | Tensor = PaddedRows(attended)
        if self.graphs is not None and len(attended) == 1 and attended[0].index is None:
            pool = attended[0].pool
            rows, adapters = len(canvases), attended[0].adapters
            attend = self._hidden(self.graphs, batch_rows[0].batch, rows, pool, adapters)
        evaluated = evaluate(self.network, layout.parts, layout.scoring, attend, ordered)
        return ForwardResult(evaluated, layout, ordered, states)

    @torch.no_grad()
    def apply(self, result: ForwardResult) -> Pending:
        """Moves the rows on, and starts the copy of what the host learns of it.

        Raises only while nothing has been written, so that forward and apply may be tried again;
        ValueError where the rows have become others', or been moved on, since the forward.
        """
        if any(batch_rows.state != state for batch_rows, state in result.batch_rows):
            raise ValueError("the rows were given away or moved on since this forward")
        updates, words = move(result.layout.parts, result.evaluated)
        layout = result.layout
        pending = Pending(
            result.canvases,
            layout.order,
            tuple((part.batch.rows, part.batch.width) for part in layout.parts),
            tuple(new.errors for new in updates),
            {row: _top_of(own) for row, own in result.evaluated[1].items()},
            updates[0].top_ids.shape[-1],
            *to_host(words),
            self._outstanding,
        )
        for batch_rows, _ in result.batch_rows:
            batch_rows.steps += 1
        try:
            write(layout.parts, updates)
        except Exception as failure:
            pending.failure = failure
        return pending

    def advance(self, result: ForwardResult) -> list[Draft | Exception]:
        """Moves the canvases on: of each its draft, or what failed in it alone, in the order of
        `forward`. Raises only what `apply` does."""
        return [
            ValueError("the canvas was done before this step") if row is None else row
            for row in self.apply(result).results()
        ]

    def step(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[Draft]:
        """`forward` and `advance`. Raises what fails in one of the canvases."""
        drafts = []
        for result in self.advance(self.forward(canvases, slots)):
            if isinstance(result, Exception):
                raise result
            drafts.append(result)
        return drafts

    def groups(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[list[int]] | None:
        """The canvases of each width, by their places, which `launch` takes together; None where
        some cannot have a captured step, and it takes all."""
        by_key: dict[Key, list[int]] = {}
        for place, canvas in enumerate(canvases):
            by_key.setdefault(self._key(canvas), []).append(place)
        groups = list(by_key.values())
        served = (
            self._is_served([canvases[i] for i in group], [slots[i] for i in group])
            for group in groups
        )
        return groups if all(served) else None

    @torch.no_grad()
    def launch(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Pending:
        """Moves the rows on, `Commit`s among them, and starts the copy of what the host learns.

        Raises only while nothing has been written, but for what commits put into the cache beyond
        their slots' prefixes; ValueError where there are commits and no step for them.
        """
        if not self._is_served(canvases, slots):
            if any(isinstance(canvas, Commit) for canvas in canvases):
                raise ValueError("commits are rows only of steps that can be captured")
            result = self.forward(canvases, slots)
            if self.graphs is None:  # up to here all may be run again, and nothing after it
                self.network.synchronize()
            return self.apply(result)
        assert self.graphs is not None
        self._layout = None  # what it notes in the batches is about to be overwritten
        batch_rows = self._rows_of(self._key(canvases[0]))
        placed = tuple(batch_rows.take([canvases]))
        places = {id(canvas): place for place, canvas in enumerate(canvases)}
        order = tuple(places[id(canvas)] for canvas in placed)
        step = self._step(self.graphs, batch_rows, placed, [slots[place] for place in order])
        self.graphs.run(step)
        batch_rows.steps += 1
        shape, top = (step.kind.rows, step.width), min(TOP, self.network.config.vocab_size)
        words = step.words.flatten(), None
        pending = Pending(placed, order, (shape,), ({},), {}, top, *words, self._outstanding)
        try:
            # The next step writes over its words; on a CPU they would be the host's own.
            pending.words, pending.copied = to_host(pending.words.clone())
        except Exception as failure:
            pending.failure = failure
        return pending

    def _is_served(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> bool:
        """Whether the canvases can have a captured step. Logs what is in the way, once."""
        keys = {self._key(canvas) for canvas in canvases}
        if self.graphs is None or len(keys) != 1:
            return False
        why = obstacle(canvases, slots, self._rows_of(keys.pop()).batch, self._probe)
        if why is not None and why not in self._logged:
            self._logged.add(why)
            log.info("at most the forward of a step is captured where %s", why)
        return why is None

    def _step(
        self,
        graphs: StepGraphs,
        batch_rows: BatchRows,
        canvases: Sequence[Canvas],
        slots: Sequence[Slot],
    ) -> DeviceStep:
        """The captured step of canvases, in the order of their rows, prepared for them."""
        version = batch_rows.version, _addresses(slots)
        known, last = self._prepared.get(batch_rows, (None, None))
        if known == version and last is not None and last.is_of(batch_rows.batch) and last.is_alive:
            return last
        kind = StepKind.of(canvases, slots, self.network.config.vocab_size)
        batch, pool = batch_rows.batch, slots[0].pool
        kept = graphs.kept(DeviceStep)
        step = next((one for one in kept if one.serves(batch, pool, kind)), None)
        if step is None:
            step = DeviceStep(self.network, batch, pool, kind)
            graphs.add(step)
        self._prepared.pop(batch_rows, None)
        step.prepare_for_replay(canvases, slots)
        self._prepared[batch_rows] = version, step
        return step

    def _hidden(
        self,
        graphs: StepGraphs,
        batch: StepBatch,
        rows: int,
        pool: KVPool,
        adapters: frozenset[int],
    ) -> Tensor:
        """The hidden states of a batch's first rows, whose slots and lengths it notes, by a forward
        that is captured by itself. They are overwritten by the next such forward."""
        kept = [each for each in graphs.kept(BatchForward) if each.is_of(batch)]
        step = next((each for each in kept if each.has(pool, rows, adapters)), None)
        if step is None:
            batch_hidden = kept[0].batch_hidden if kept else None
            step = BatchForward(self.network, pool, batch, rows, adapters, batch_hidden)
            graphs.add(step)
        graphs.run(step)
        return step.hidden

    def _lay_out(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Layout:
        groups: dict[Key, dict[int, list[Canvas]]] = {}  # rows of one pool stand together
        for canvas, slot in zip(canvases, slots, strict=True):
            groups.setdefault(self._key(canvas), {}).setdefault(id(slot.pool), []).append(canvas)
        placed = {key: self._rows_of(key).take(list(groups[key].values())) for key in groups}
        places = {id(canvas): place for place, canvas in enumerate(canvases)}
        order = [places[id(canvas)] for members in placed.values() for canvas in members]
        version = (
            tuple(order),
            tuple(
                (key, len(members), self._batch_rows[key].version)
                for key, members in placed.items()
            ),
            _addresses(slots),
        )
        if self._layout is None or self._layout[0] != version:
            self._layout = None  # what it notes in the batches is about to be overwritten
            self._prepared.clear()
            batches = [
                (self._batch_rows[key].batch, members, [slots[places[id(c)]] for c in members])
                for key, members in placed.items()
            ]
            vocab_size, device = self.network.head.vocab_size, self.network.device
            mask = canvases[0].mask_id
            layout = lay_out(order, batches, vocab_size, device, self._probe, mask)
            self._layout = version, layout
        return self._layout[1]

    def _key(self, canvas: Canvas) -> Key:
        longest = self.network.config.canvas_length
        width = canvas.step_width if isinstance(canvas, Commit) else None
        width = width or width_for(canvas.length, longest)
        return Key(width, canvas.history_rows)

    def _rows_of(self, key: Key) -> BatchRows:
        if key not in self._batch_rows:
            network, hidden = self.network, self.network.config.hidden_size
            self._batch_rows[key] = BatchRows(
                lambda rows: StepBatch.allocate(rows, *key, hidden, network.dtype, network.device),
                self._rows,
            )
        return self._batch_rows[key]
