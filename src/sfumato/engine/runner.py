"""Runs the phases of a step on the network, and one step of each kind before the first request.

A row that fails does not disturb the others: see recovery.py. Scores share a step with canvases
that denoise, so that a task of a thousand questions must stop none of these, nor another task of
one question. Knows no queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, CanvasPlan, Draft
from sfumato.diffusion.causal import draw_next
from sfumato.diffusion.constraints.decision_plan import NoiseKey
from sfumato.diffusion.constraints.read import (
    PIECE,
    CanvasRow,
    ReadChunk,
    read_canvases,
    run_chunks,
)
from sfumato.diffusion.constraints.read_template import NOISE, ReadCanvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import WIDTHS, Commit
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.diffusion.step.graphs import RUNS, graph_backend
from sfumato.engine.late_steps import CommitRow, Denoised, EncodeTime, EncodeTimes, Item, Steps
from sfumato.engine.memory.estimate import question_places
from sfumato.engine.pictures import Pictures
from sfumato.engine.queue.scheduler import Piece, Share
from sfumato.engine.recovery import BatchRecovery, free_memory
from sfumato.engine.row import Row
from sfumato.model.cache import QuestionPool, Slot
from sfumato.model.devices import fetch_together, is_out_of_memory
from sfumato.model.network import PREFILL_CHUNK, Network, prefill_chunk
from sfumato.model.segments import Suffix
from sfumato.model.vision.mask import SoftTokens
from sfumato.tasks.works import Draw

log = logging.getLogger(__name__)

_Owned = tuple[Row, ReadChunk]


@dataclass(frozen=True)
class Scored:
    """What a step's scores gave a row: nothing, or an error."""

    row: Row
    tokens: int  # that went through the network
    is_read: bool  # whether questions were among what was scored
    error: Exception | None


class ScoreRunner:
    """Runs the chunks of scores of rows.

    A batch of reads that raises is run again in halves, so that only those rows fail of which one
    chunk raises by itself. Where memory ran out, a chunk that is left alone goes through the
    network in smaller forwards, down to one canvas of one sample, and the steps that follow read
    half as many tokens, until no row is left."""

    def __init__(
        self,
        network: Network,
        free: Callable[[Exception], None],
        forwards: ReadForwards | None = None,
    ) -> None:
        """free: gives back unused memory, where an error was for want of it; forwards: of a device
        that works by itself."""
        self._network, self._free, self._forwards = network, free, forwards
        self._scored = 0  # shares of all rows
        self._limit: int | None = None  # tokens, after a memory shortage

    def run(self, share: Share) -> list[Scored]:
        """Scores for the rows whose last share is longest ago, each an equal share of the tokens or
        one item."""
        if not share.sharers:
            self._limit = None
        tokens = share.tokens if self._limit is None else min(share.tokens, self._limit)
        chunks: dict[Row, list[ReadChunk]] = {}
        sizes: dict[Row, int] = {}
        # One long question is open at a time, since it takes the memory of a slot of its length.
        has_long = any(row.score.holds_long for row in share.rows)
        for row in sorted(share.rows, key=lambda row: row.last_scored):
            if chunks and sum(sizes.values()) >= tokens:
                break
            if row.score.begins_long:
                if has_long:
                    continue
                has_long = True
            chunks[row] = row.score.chunks(row.slot, tokens // max(1, share.sharers))
            row.last_scored, self._scored = self._scored, self._scored + 1
            sizes[row] = sum(chunk.tokens for chunk in chunks[row]) + row.score.line_tokens
        errors: dict[Row, Exception] = {}
        reads = [(row, chunk) for row, own in chunks.items() for chunk in own]
        if reads:
            self._take(reads, errors)
        for row in chunks:
            if row not in errors and (error := self._score_lines(row)) is not None:
                errors[row] = error
        return [Scored(row, sizes[row], bool(own), errors.get(row)) for row, own in chunks.items()]

    def _score_lines(self, row: Row) -> Exception | None:
        """Scores the likelihoods of a row's chunk; returns what kept it from that."""
        if not row.score.line_tokens:
            return None
        try:
            row.score.score_lines(self._network, row.slot, row.prefix)
            self._network.synchronize()
        except Exception as error:
            self._free(error)
            return error
        return None

    def _take(
        self,
        items: Sequence[_Owned],
        errors: dict[Row, Exception],
        together: int = PREFILL_CHUNK,
    ) -> None:
        """Runs the chunks, and adds what one raised by itself to the errors. together: tokens of a
        forward at most."""
        total = sum(chunk.tokens for _, chunk in items)
        smaller = 0
        try:
            run_chunks(self._network, [chunk for _, chunk in items], together, self._forwards)
            return
        except Exception as error:
            if is_out_of_memory(error):
                self._limit = max(1, total // 2)
                smaller = min(together, total) // 2
                self._free(error)
            elif len(items) > 1:
                log.exception("%d reads failed together; they are read in halves", len(items))
            # Of fewer tokens than the narrowest canvas each forward has one canvas already.
            if len(items) == 1 and smaller < WIDTHS[0]:
                errors.setdefault(items[0][0], error)
                return
        if len(items) == 1:
            self._take(items, errors, smaller)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            self._take([item for item in part if item[0] not in errors], errors)


@dataclass(frozen=True)
class Segment:
    """Tokens that one forward appends to a row's slot."""

    row: Row
    ids: list[int]
    pictures: Sequence[SoftTokens] = ()  # among them


Encoded = tuple[Segment, Exception | None]


@dataclass
class Results:
    """What a phase of a step gave. Where steps are late, drafts are those of the step before."""

    began: float  # by the clock
    encoded: list[Encoded] = field(default_factory=list)
    commits: Sequence[CommitRow] = ()  # that go with the canvases of the step
    drafts: list[Denoised] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    score_s: float = 0.0
    times: list[EncodeTime] = field(default_factory=list)  # of this step or earlier ones
    failed: Sequence[tuple[Row, Exception]] = ()  # rows whose picture cannot be encoded


class Runner:
    """Encodes, denoises, draws and scores batches of rows."""

    def __init__(self, network: Network, rows: int, chunk: int, clock: Callable[[], float]) -> None:
        """rows: that a step has at most, larger slots left aside; chunk: tokens of the reads of a
        step at most."""
        self._network, self._clock = network, clock
        self._backend = backend = None if network.is_mixed else graph_backend(network.device)
        if network.is_mixed:
            log.info("steps are not captured: graphs are for models in one device's memory")
        self._denoiser = Denoiser(network, rows, backend)
        self._steps = Steps(self._denoiser, self._free, clock)
        self._draws = BatchRecovery(self._draw_batch, self._free, lambda item: item[0])
        self._encode_times = EncodeTimes(network.device, clock)
        self._pictures = Pictures(network, self._free)
        self._forwards = None
        if self._denoiser.graphs is not None:
            places = question_places(rows, max(1, chunk))
            kinds = network.cache_dtype, network.device
            questions = QuestionPool(network.config, places, PIECE, *kinds)
            self._forwards = ReadForwards(network, self._denoiser.graphs, questions)
        self._scores = ScoreRunner(network, self._free, self._forwards)

    def warm_up(self, slots: Sequence[Slot], config: SamplerConfig) -> None:
        """Compiles what steps run, where the network's device works by itself. A
        failure is left to the first request, whose it may not be."""
        if self._backend is None or not slots:
            return
        try:
            warm_up(self._denoiser, slots, config, self._forwards)
        except Exception as error:
            log.warning("the steps before the first request failed", exc_info=error)
            self._free(error)

    def see(self, rows: Sequence[Row]) -> Results:
        """Takes a picture of rows that lack one a slice of the vision tower on; the time counts as
        that of an encode."""
        began = self._encode_times.stamp()
        failed = self._pictures.take_on(rows)
        if rows:
            self._encode_times.add(rows, began)
        return Results(self._clock(), failed=failed)

    def encode(self, pieces: Sequence[Piece]) -> Results:
        """Encodes each piece, in one go where no mark is on the way. Waits for the device, unless
        steps are late; then commits that may be rows of the step are left to it.

        A slot in which an encode raised is empty afterwards.
        """
        began, commits = self._clock(), self._steps.commits(pieces)
        apart = {piece.row for piece, _ in commits}
        encoded = self._encode_pieces([piece for piece in pieces if piece.row not in apart])
        # Of late steps the device encodes before that whose results are read next.
        times = [] if self._steps.late else self._encode_times.done()
        return Results(began, encoded, commits, times=times)

    def denoise(self, items: Sequence[Item], commits: Sequence[CommitRow] = ()) -> Results:
        """Moves each canvas a step on: its draft, or why there is none. Canvases left out had no
        room in memory this time and may try again."""
        ready, failed = self._prepared(items)
        encoded: list[Encoded] = []
        if commits and not self._steps.serves(ready, commits):
            encoded = self._encode_pieces([piece for piece, _ in commits])
            commits = ()
        failed_items, failed_commits = self._steps.launch(ready, commits)
        for piece, _ in commits:
            (segment,) = _segments(piece)
            error = failed_commits.get(piece.row)
            if error is None:
                _extend(segment)
            encoded.append((segment, error))
        results, began = self._steps.results()
        # The device encodes before the step whose results were read just now.
        times = self._encode_times.done()
        began = min(self._clock(), began + sum(seconds for _, seconds in times))
        # What a canvas's last step gave comes before what ended it in this one.
        drafts = [*results, *failed, *failed_items]
        return Results(began, encoded, drafts=drafts, times=times)

    def draw(self, rows: Sequence[Row]) -> Results:
        """The next token of each row, as a draft, or why there is none. Rows left out had no room
        in memory this time and may try again."""
        began = self._clock()
        works = [(row, row.work.canvas) for row in rows if isinstance(row.work, Draw)]
        ready, failed = self._prepared(works)
        drawn = self._draws.run(ready)
        return Results(began, drafts=[*failed, *((*item, result) for item, result in drawn)])

    def score(self, share: Share) -> Results:
        """Takes scores of the rows that share them."""
        began = self._clock()
        scored = self._scores.run(share)
        seconds, times = self._clock() - began, []
        if scored:  # which have waited for all that was launched before
            times = self._encode_times.done()
            seconds = max(0.0, seconds - sum(encode_s for _, encode_s in times))
        return Results(began, scored=scored, score_s=seconds, times=times)

    def _prepared(self, items: Sequence[Item]) -> tuple[list[Item], list[Denoised]]:
        """The canvases that are ready for a step, and those that are not, with the reason: what
        fails here is one row's own fault."""
        ready: list[Item] = []
        failed: list[Denoised] = []
        for row, canvas in items:
            try:
                canvas.prepare()
            except Exception as error:
                failed.append((row, canvas, error))
            else:
                ready.append((row, canvas))
        return ready, failed

    @property
    def is_ahead(self) -> bool:
        """Whether a step has been launched whose results are not known."""
        return self._steps.is_ahead

    def between_steps(self) -> None:
        """Captures one step that has run, where there is any."""
        if self._denoiser.graphs is not None:
            self._denoiser.graphs.capture_next()

    def _free(self, error: Exception) -> None:
        """Gives back unused memory, graphs included, where an error was for want of it."""
        if not is_out_of_memory(error):
            return
        if self._denoiser.graphs is not None:
            self._denoiser.graphs.release()
        self._pictures.forget()
        free_memory(self._network.device, error)

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[Encoded]:
        if not pieces:
            return []
        results: list[Encoded] = []
        began = self._encode_times.stamp()
        # The first segments of all rows go together, then the second ones, and so on.
        for segments in zip_longest(*map(_segments, pieces)):
            failed = {segment.row for segment, error in results if error}
            results += self._encode([s for s in segments if s and s.row not in failed])
        self._encode_times.add([piece.row for piece in pieces], began)
        return results

    def _encode(self, segments: list[Segment]) -> list[Encoded]:
        if not segments:
            return []
        slots = [segment.row.slot for segment in segments]
        try:
            # One forward: the network shares a chunk equally among the rows.
            ids = [torch.tensor(segment.ids) for segment in segments]
            pictures = [segment.pictures for segment in segments]
            hidden: list[Tensor] = []
            if any(segment.row.want is not None for segment in segments):
                hidden = self._network.encode_hidden(ids, slots, pictures)
            else:
                chunk = len(segments) * max(len(segment.ids) for segment in segments)
                self._network.encode(ids, slots, chunk, pictures=pictures)
            if not self._steps.late:
                self._network.synchronize()
        except Exception as error:
            self._free(error)
            return [(segment, error) for segment in segments]
        for segment in segments:
            _extend(segment)
        pairs = zip_longest(segments, hidden)
        return [(segment, self._take_hidden(segment, own)) for segment, own in pairs]

    def _take_hidden(self, segment: Segment, hidden: Tensor | None) -> Exception | None:
        """Gives a row the hidden states that it wants; returns what kept it from taking them."""
        want, network = segment.row.want, self._network
        if hidden is None or want is None:
            return None
        start = segment.row.slot.length - len(hidden)
        try:
            want.add(network.head, start, hidden, network.config.canvas_length)
        except Exception as error:
            self._free(error)
            return error
        return None

    def _draw_batch(self, items: Sequence[Item]) -> list[Draft | Exception]:
        works = [row.work for row, _ in items if isinstance(row.work, Draw)]
        states = torch.cat([work.state for work in works])
        return draw_next(self._network, [work.canvas for work in works], states)


def _extend(segment: Segment) -> None:
    """Notes which tokens the slot holds now, and keeps a snapshot where one is wanted."""
    lease = segment.row.lease
    assert lease
    lease.extend(segment.ids)
    if lease.slot.length in lease.marks:
        try:
            lease.pool.mark(lease)
        except Exception:  # a mark only saves work later
            log.exception("a snapshot of slot %d could not be taken", lease.index)


def _segments(piece: Piece) -> list[Segment]:
    """A piece, cut where the slot is to be marked."""
    row = piece.row
    assert row.lease
    start, end = row.encoded, row.encoded + piece.count
    soft = () if row.soft is None else (row.soft,)
    cuts = [start, *(mark for mark in row.lease.marks if start < mark < end), end]
    return [
        Segment(
            row,
            row.prefix[a:b].tolist(),
            [each.moved(-a) for each in soft if a <= each.start < b],
        )
        for a, b in pairwise(cuts)
    ]


def warm_up(
    denoiser: Denoiser,
    slots: Sequence[Slot],
    config: SamplerConfig,
    forwards: ReadForwards | None = None,
) -> None:
    """Encodes a chunk of a prompt, denoises with one row and with all of them until the step is
    captured and has been replayed, commits a canvas likewise, and reads a question, as `forwards`
    has it. slots: of all rows, empty ones; config: of a canvas, complete."""
    began = time.perf_counter()
    log.info("one step of each kind is run; kernels that were never compiled take up to minutes")
    try:
        _encode(denoiser, slots, config)
        for rows in sorted({1, len(slots)}):
            _step(denoiser, slots[:rows], config)
        _read(denoiser, slots[0], forwards)
        denoiser.network.synchronize()
    finally:
        for slot in slots:
            slot.reset()
    log.info("the steps before the first request took %.1f s", time.perf_counter() - began)


def _encode(denoiser: Denoiser, slots: Sequence[Slot], config: SamplerConfig) -> None:
    """A whole chunk, as far as a canvas fits behind it; a token in the other slots."""
    assert config.canvas_length
    chunk = prefill_chunk(denoiser.network.device)
    chunk = max(1, min(chunk, slots[0].room() - config.canvas_length))
    denoiser.network.encode([_ids(chunk)], slots[:1])
    if slots[1:]:
        denoiser.network.encode([_ids(1)] * len(slots[1:]), slots[1:])


def _step(denoiser: Denoiser, slots: Sequence[Slot], config: SamplerConfig) -> None:
    """Runs the steps of as many rows as slots: denoises all of them, then commits the first."""
    assert config.canvas_length
    network = denoiser.network
    plans = (CanvasPlan(config, Noise(row, 0)) for row in range(len(slots)))
    canvases = [Canvas.of(plan, network) for plan in plans]
    steps: list[list[Canvas]] = [canvases] * (RUNS + 1)
    if room := min(config.canvas_length, slots[0].room()):
        steps.append([Commit(_ids(room).tolist(), config, network), *canvases[1:]])
    for step in steps:
        for result in denoiser.launch(step, slots).results():
            if isinstance(result, Exception):
                raise result
        if denoiser.graphs is not None:
            denoiser.graphs.capture_next()


def _read(denoiser: Denoiser, slot: Slot, forwards: ReadForwards | None) -> None:
    """A canvas of one question, whose label mass is wanted."""
    network, suffix = denoiser.network, Suffix(slot)
    if forwards is not None:
        forwards.place(suffix, 1)
    network.encode_beside([_ids(1)], [suffix])
    width = min(WIDTHS[0], network.config.canvas_length)
    canvas = ReadCanvas((NOISE, *([0] * (width - 1))), (0,), ((0, 1),))
    row = CanvasRow(suffix, canvas, NoiseKey(0, ()), 0, True)
    fetch_together([read_canvases(network, [row], 1, forwards)])


def _ids(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)
