"""Runs the phases of a step on the network. Decides nothing, and knows no queue.

A row that fails does not disturb the others: see recovery.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.causal import draw_next
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.diffusion.step.graphs import graph_backend
from sfumato.engine.late_steps import CommitRow, Denoised, EncodeTime, EncodeTimes, Item, LateSteps
from sfumato.engine.memory.estimate import question_places
from sfumato.engine.queue.scheduler import Piece, Share
from sfumato.engine.recovery import BatchRecovery, free_memory
from sfumato.engine.row import Row
from sfumato.engine.score_turns import Scored, ScoreTurns
from sfumato.engine.warm_up import warm_up
from sfumato.model.cache import QuestionPool, Slot
from sfumato.model.devices import is_out_of_memory
from sfumato.model.network import Network
from sfumato.tasks.works import Draw

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Tokens that one forward appends to a row's slot."""

    row: Row
    ids: list[int]


Encoded = tuple[Segment, Exception | None]


@dataclass(frozen=True)
class EncodeResults:
    """What the encode phase of a step gave."""

    encoded: list[Encoded]
    seconds: float  # for which the host waited; 0 where steps are late
    commits: Sequence[CommitRow] = ()  # that go with the canvases of the step


@dataclass(frozen=True)
class DenoiseResults:
    """What the denoise phase of a step gave; where steps are late, of the step before."""

    denoised: list[Denoised]
    began: float  # by the clock
    encoded: list[Encoded]  # the commits that went with it
    times: list[EncodeTime]  # of encodes of this step or earlier ones


@dataclass(frozen=True)
class DrawResults:
    """What the draw phase of a step gave."""

    drawn: list[tuple[Row, Draft | Exception]]
    began: float


@dataclass(frozen=True)
class ScoreResults:
    """What the score phase of a step gave."""

    scored: list[Scored]
    seconds: float
    times: list[EncodeTime]


class Runner:
    """Encodes, denoises, draws and scores batches of rows."""

    def __init__(self, network: Network, rows: int, chunk: int, clock: Callable[[], float]) -> None:
        """rows: that a step has at most, larger slots left aside; chunk: tokens of a prompt that a
        step encodes at most."""
        self._network, self._clock = network, clock
        self._backend = backend = None if network.is_mixed else graph_backend(network.device)
        if network.is_mixed:
            log.info("steps are not captured: graphs are for models in one device's memory")
        self._denoiser = Denoiser(network, rows, backend)
        self._batches = BatchRecovery(self._batch, self._free, _owner)
        self._draws = BatchRecovery(self._draw_batch, self._free, _owner)
        self._late = None
        if backend is not None:
            self._late = LateSteps(self._denoiser, self._free, clock)
        self._encode_times = EncodeTimes(network.device, clock)
        self._forwards = None
        if self._denoiser.device_steps is not None:
            places = question_places(rows, max(1, chunk))
            kinds = network.cache_dtype, network.device
            questions = QuestionPool(network.config, places, PIECE, *kinds)
            graphs = self._denoiser.device_steps.graphs
            self._forwards = ReadForwards(network, graphs, questions)
        self._scores = ScoreTurns(network, self._free, self._forwards)

    def warm_up(self, slots: Sequence[Slot], config: SamplerConfig) -> None:
        """Compiles what steps run, where the network's device works by itself; see warm_up.py. A
        failure is left to the first request, whose it may not be."""
        if self._backend is None or not slots:
            return
        denoiser = Denoiser(self._network, len(slots), self._backend)
        try:
            warm_up(denoiser, slots, config, self._forwards)
        except Exception as error:
            log.warning("the steps before the first request failed", exc_info=error)
            if is_out_of_memory(error):
                self._free(error)

    def encode(self, pieces: Sequence[Piece]) -> EncodeResults:
        """Encodes each piece, in one go where no mark is on the way. Waits for the device, unless
        steps are late; then commits that may be rows of the step are left to it.

        A slot in which an encode raised is empty afterwards.
        """
        began = self._clock()
        commits = [] if self._late is None else self._late.commits(pieces)
        apart = {commit.row for commit in commits}
        encoded = self._encode_pieces([piece for piece in pieces if piece.row not in apart])
        seconds = self._clock() - began if self._late is None else 0.0
        return EncodeResults(encoded, seconds, commits)

    def denoise(self, items: Sequence[Item], commits: Sequence[CommitRow] = ()) -> DenoiseResults:
        """Moves each canvas a step on: its draft, or why there is none. Canvases left out had no
        room in memory this time and may try again."""
        began = self._clock()
        ready, failed = self._prepared(items)
        encoded: list[Encoded] = []
        if self._late is None:
            steps = self._batches.run(ready)
            denoised = [*failed, *((*item, result) for item, result in steps)]
        else:
            encoded, denoised, began = self._launch(self._late, ready, failed, commits)
        # The device encodes before the step whose results were read just now.
        times = self._encode_times.done()
        began = min(self._clock(), began + sum(time.seconds for time in times))
        return DenoiseResults(denoised, began, encoded, times)

    def _launch(
        self,
        late: LateSteps,
        items: Sequence[Item],
        failed: Sequence[Denoised],
        commits: Sequence[CommitRow],
    ) -> tuple[list[Encoded], list[Denoised], float]:
        """Launches a step, and returns its commits and the results of the step before it, with the
        time when that began. Commits that cannot be rows of the step are encoded before it."""
        encoded: list[Encoded] = []
        if commits and not late.serves(items, commits):
            encoded = self._encode_pieces([commit.piece for commit in commits])
            commits = ()
        failures = late.launch(items, commits)
        for commit in commits:
            (segment,) = _segments(commit.piece)
            error = failures.commits.get(commit.row)
            if error is None:
                _extend(segment)
            encoded.append((segment, error))
        results, began = late.results()
        # What a canvas's last step gave comes before what ended it in this one.
        return encoded, [*results, *failed, *failures.items], began

    def draw(self, rows: Sequence[Row]) -> DrawResults:
        """The next token of each row, as a draft, or why there is none. Rows left out had no room
        in memory this time and may try again."""
        began = self._clock()
        works = [(row, row.work.canvas) for row in rows if isinstance(row.work, Draw)]
        ready, failed = self._prepared(works)
        drawn = self._draws.run(ready)
        results = [*((row, error) for row, _, error in failed), *((i[0], r) for i, r in drawn)]
        return DrawResults(results, began)

    def score(self, share: Share) -> ScoreResults:
        """Takes scores of the rows that share them."""
        began = self._clock()
        scored = self._scores.run(share)
        seconds, times = self._clock() - began, []
        if scored:  # which have waited for all that was launched before
            times = self._encode_times.done()
            seconds = max(0.0, seconds - sum(time.seconds for time in times))
        return ScoreResults(scored, seconds, times)

    def _prepared(self, items: Sequence[Item]) -> tuple[list[Item], list[Denoised]]:
        """The canvases that are ready for a step, and those that are not, with the reason: what
        fails here is one row's own fault."""
        ready: list[Item] = []
        failed: list[Denoised] = []
        for row, canvas in items:
            error = self._prepare(canvas)
            if error is None:
                ready.append((row, canvas))
            else:
                failed.append((row, canvas, error))
        return ready, failed

    def _prepare(self, canvas: Canvas, again: bool = True) -> Exception | None:
        """Makes ready what a step needs of one canvas alone; returns what kept it from that. again:
        whether memory that is not enough is freed for a second try."""
        try:
            canvas.prepare()
        except Exception as error:
            if not (again and is_out_of_memory(error)):
                return error
            self._free(error)
            return self._prepare(canvas, again=False)
        return None

    @property
    def is_ahead(self) -> bool:
        """Whether a step has been launched whose results are not known."""
        return self._late is not None and self._late.is_ahead

    def between_steps(self) -> None:
        """Captures one step that has run, where there is any."""
        if self._denoiser.device_steps is not None:
            self._denoiser.device_steps.graphs.capture_next()

    def _free(self, error: Exception) -> None:
        """Gives back unused memory, graphs included, after an error for want of it."""
        if self._denoiser.device_steps is not None:
            self._denoiser.device_steps.graphs.release()
        free_memory(self._network.device, error)

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[Encoded]:
        results: list[Encoded] = []
        stamp = self._encode_times.stamp() if pieces and self._late is not None else None
        # The first segments of all rows go together, then the second ones, and so on.
        for segments in zip_longest(*map(_segments, pieces)):
            failed = {segment.row for segment, error in results if error}
            results += self._encode([s for s in segments if s and s.row not in failed])
        if stamp is not None:
            self._encode_times.add([piece.row for piece in pieces], stamp)
        return results

    def _encode(self, segments: list[Segment]) -> list[Encoded]:
        if not segments:
            return []
        slots = [_slot(segment.row) for segment in segments]
        try:
            # One forward: the network shares a chunk equally among the rows.
            ids = [torch.tensor(segment.ids) for segment in segments]
            hidden: list[Tensor] = []
            if any(segment.row.want is not None for segment in segments):
                hidden = self._network.encode_hidden(ids, slots)
            else:
                chunk = len(segments) * max(len(segment.ids) for segment in segments)
                self._network.encode(ids, slots, chunk)
            if self._late is None:
                self._network.synchronize()
        except Exception as error:
            if is_out_of_memory(error):
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
        start = _slot(segment.row).length - len(hidden)
        try:
            want.add(network.head, start, hidden, network.config.canvas_length)
        except Exception as error:
            if is_out_of_memory(error):
                self._free(error)
            return error
        return None

    def _batch(self, items: Sequence[Item]) -> list[Draft | Exception]:
        canvases = [canvas for _, canvas in items]
        result = self._denoiser.forward(canvases, [_slot(row) for row, _ in items])
        self._network.synchronize()  # up to here nothing has changed, and all may be run again
        return self._denoiser.advance(result)

    def _draw_batch(self, items: Sequence[Item]) -> list[Draft | Exception]:
        works = [row.work for row, _ in items if isinstance(row.work, Draw)]
        states = torch.cat([work.state for work in works])
        return draw_next(self._network, [work.canvas for work in works], states)


def _owner(item: Item) -> Row:
    return item[0]


def _extend(segment: Segment) -> None:
    """Notes which tokens the slot holds now, and keeps a snapshot where one is wanted."""
    lease = segment.row.lease
    assert lease
    lease.extend(segment.ids)
    if lease.slot.length in lease.marks:
        try:
            lease.mark()
        except Exception:  # a mark only saves work later
            log.exception("a snapshot of slot %d could not be taken", lease.index)


def _slot(row: Row) -> Slot:
    assert row.lease
    return row.lease.slot


def _segments(piece: Piece) -> list[Segment]:
    """A piece, cut where the slot is to be marked."""
    row = piece.row
    assert row.lease
    start, end = row.encoded, row.encoded + piece.count
    cuts = [start, *(mark for mark in row.lease.marks if start < mark < end), end]
    return [Segment(row, row.prefix[a:b].tolist()) for a, b in pairwise(cuts)]
