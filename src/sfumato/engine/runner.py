"""Runs a plan on the network. Decides nothing, and knows no queue.

A row that fails does not disturb the others: see recovery.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.causal import row_next_scores
from sfumato.diffusion.causal_step import draw_next
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.cuda_graphs import graph_backend
from sfumato.diffusion.step.read_forwards import ReadForwards
from sfumato.engine.any_row import AnyRow
from sfumato.engine.encode_times import EncodeTime, EncodeTimes
from sfumato.engine.fill_turns import FillResult, FillTurns
from sfumato.engine.late_steps import CommitRow, LateSteps
from sfumato.engine.memory_estimate import question_places
from sfumato.engine.read_turns import ReadResult, ReadTurns
from sfumato.engine.recovery import BatchRecovery, free_memory
from sfumato.engine.row import Row
from sfumato.engine.scheduler import Piece, Plan
from sfumato.engine.warm_up import warm_up
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.model.out_of_memory import is_out_of_memory
from sfumato.model.question_pool import QuestionPool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Tokens that one forward appends to a row's slot."""

    row: AnyRow
    ids: list[int]


Encoded = tuple[Segment, Exception | None]
Denoised = tuple[Row, Draft | Exception]
Written = tuple[Row, Tensor]  # the scores float32 [vocabulary] of its next token


@dataclass(frozen=True)
class StepResults:
    """What a step gave, for each row its result or its error."""

    encoded: list[Encoded]
    encode_s: float  # for which the host waited; 0 where steps are late
    late_encodes: list[EncodeTime]  # of this step or earlier ones
    denoised: list[Denoised]
    began: float  # when the denoising began, by the clock
    written: list[Written]
    write_s: float
    drawn: list[Denoised]  # of causal rows
    draw_began: float  # when these were begun to be drawn
    draw_s: float
    read: list[ReadResult]
    read_s: float
    filled: list[FillResult]
    fill_s: float


class Runner:
    """Encodes and denoises batches of rows."""

    def __init__(self, network: Network, rows: int, chunk: int, clock: Callable[[], float]) -> None:
        """rows: that a step has at most, larger slots left aside; chunk: tokens of a prompt that a
        step encodes at most."""
        self._network, self._clock = network, clock
        self._backend = backend = None if network.is_mixed else graph_backend(network.device)
        if network.is_mixed:
            log.info("steps are not captured: graphs are for models in one device's memory")
        self._denoiser = Denoiser(network, rows, backend)
        self._batches = BatchRecovery(self._batch, self._free)
        self._draws = BatchRecovery(self._draw_batch, self._free)
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
        self._read_turns = ReadTurns(network, self._free, self._forwards)
        self._fill_turns = FillTurns(network, self._free)

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

    def run(self, plan: Plan, is_wanted: Callable[[AnyRow], bool]) -> StepResults:
        """Encodes the plan's pieces, then denoises, scores the next tokens of, or draws tokens for,
        those of its rows that did not fail meanwhile and are still wanted, and reads questions.
        Where steps are late, the drafts of canvases are those of the step before."""
        began = self._clock()
        commits = [] if self._late is None else self._late.commits(plan.encode)
        apart = {commit.row for commit in commits}
        encoded = self.encode([piece for piece in plan.encode if piece.row not in apart])
        denoise = self._clock()
        encode_s = denoise - began if self._late is None else 0.0
        failed = {segment.row for segment, error in encoded if error}
        rows = [row for row in plan.denoise if row not in failed | apart and is_wanted(row)]
        if self._late is None:
            denoised, began_step = self.denoise(rows), denoise
        else:
            committed, denoised, began_step = self._launch(self._late, rows, commits)
            encoded += committed
        write = self._clock()
        writers = [row for row in plan.write if row not in failed | apart and is_wanted(row)]
        written = self._write(writers, encoded)
        draw = self._clock()
        drawn = self.draw([row for row in plan.draw if row not in failed and is_wanted(row)])
        read = self._clock()
        # The device encodes before the step whose results were read just now.
        times = self._encode_times.done()
        began_step = min(read, began_step + sum(time.seconds for time in times))
        readers = [row for row in plan.read if row not in failed and is_wanted(row)]
        results = self._read_turns.run(readers, plan.read_tokens, plan.decisions)
        fill = self._clock()
        read_s = fill - read
        if results:  # which have waited for all that was launched before
            waited = self._encode_times.done()
            times += waited
            read_s = max(0.0, read_s - sum(time.seconds for time in waited))
        fillers = [row for row in plan.fill if row not in failed and is_wanted(row)]
        filled = self._fill_turns.run(fillers)
        return StepResults(
            encoded=encoded,
            encode_s=encode_s,
            late_encodes=times,
            denoised=denoised,
            began=began_step,
            written=written,
            write_s=draw - write if writers else 0.0,
            drawn=drawn,
            draw_began=draw,
            draw_s=read - draw,
            read=results,
            read_s=read_s,
            filled=filled,
            fill_s=self._clock() - fill,
        )

    def _write(self, rows: Sequence[Row], encoded: list[Encoded]) -> list[Written]:
        """Encodes the last token of each row, and returns the scores of what follows. What fails is
        an encoding that has failed."""
        written: list[Written] = []
        together = [row for row in rows if not row.encodes_alone]
        alone = [[row] for row in rows if row.encodes_alone]
        for group in [together, *alone] if together else alone:
            segments = [Segment(row, row.prefix[_slot(row).length :].tolist()) for row in group]
            results = self._scores(segments)
            for row, segment, result in zip(group, segments, results, strict=True):
                if isinstance(result, Exception):
                    encoded.append((segment, result))
                    continue
                _extend(segment)
                encoded.append((segment, None))
                written.append((row, result))
        return written

    def _scores(self, segments: Sequence[Segment]) -> Sequence[Tensor | Exception]:
        """What follows each segment, or what kept it from being encoded: one forward."""
        slots = [_slot(segment.row) for segment in segments]
        ids = [torch.tensor(segment.ids) for segment in segments]
        try:
            return row_next_scores(self._network, slots, ids)
        except Exception as error:  # it has emptied the slots of all
            if is_out_of_memory(error):
                self._free(error)
                for segment in segments:  # one by one they may fit
                    segment.row.encodes_alone = True
            return [error] * len(segments)

    @property
    def is_ahead(self) -> bool:
        """Whether a step has been launched whose results are not known."""
        return self._late is not None and self._late.is_ahead

    def between_steps(self) -> None:
        """Captures one step that has run, where there is any."""
        if self._denoiser.device_steps is not None:
            self._denoiser.device_steps.graphs.capture_next()

    def _launch(
        self, late: LateSteps, rows: Sequence[Row], commits: Sequence[CommitRow]
    ) -> tuple[list[Encoded], list[Denoised], float]:
        """Launches a step, and returns its commits and the results of the step before it, with the
        time when that began. Commits that cannot be rows of the step are encoded before it."""
        ready, unready = self._opened(rows)
        encoded: list[Encoded] = []
        if commits and not late.serves(ready, commits):
            encoded, commits = self.encode([commit.piece for commit in commits]), ()
        failures = late.launch(ready, commits)
        for commit in commits:
            (segment,) = _segments(commit.piece)
            error = failures.commits.get(commit.row)
            if error is None:
                _extend(segment)
            encoded.append((segment, error))
        results, began = late.results()
        # What a row's last step gave comes before what ended it in this one.
        return encoded, [*results, *unready, *failures.rows], began

    def _opened(self, rows: Sequence[Row]) -> tuple[list[Row], list[Denoised]]:
        """The rows that are ready for a step, and those that are not, with the reason."""
        opened = [(row, self._open(row)) for row in rows]  # apart: what fails here is one row's
        failed: list[Denoised] = [(row, error) for row, error in opened if error is not None]
        return [row for row, error in opened if error is None], failed

    def _free(self, error: Exception) -> None:
        """Gives back unused memory, graphs included, after an error for want of it."""
        if self._denoiser.device_steps is not None:
            self._denoiser.device_steps.graphs.release()
        free_memory(self._network.device, error)

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Encodes each piece, in one go where no mark is on the way. Waits for the device, unless
        steps are late.

        A slot in which an encode raised is empty afterwards.
        """
        results: list[Encoded] = []
        stamp = self._encode_times.stamp() if pieces and self._late is not None else None
        # The first segments of all rows go together, then the second ones, and so on.
        for segments in zip_longest(*map(_segments, pieces)):
            failed = {segment.row for segment, error in results if error}
            results += self._encode([s for s in segments if s and s.row not in failed])
        if stamp is not None:
            self._encode_times.add([piece.row for piece in pieces], stamp)
        return results

    def denoise(self, rows: Sequence[Row]) -> list[Denoised]:
        """Moves each row's canvas a step on: its draft, or why there is none. Rows left out had no
        room in memory this time and may try again."""
        ready, failed = self._opened(rows)
        return failed + self._batches.run(ready)

    def draw(self, rows: Sequence[Row]) -> list[Denoised]:
        """The next token of each causal row, as a draft, or why there is none. Rows left out had no
        room in memory this time and may try again."""
        ready, failed = self._opened(rows)
        return failed + self._draws.run(ready)

    def _open(self, row: Row, again: bool = True) -> Exception | None:
        """Makes ready what a step needs of one row alone; returns what kept it from that. again:
        whether memory that is not enough is freed for a second try."""
        try:
            row.open(self._network).prepare()
        except Exception as error:
            if not (again and is_out_of_memory(error)):
                return error
            self._free(error)
            return self._open(row, again=False)
        return None

    def _encode(self, segments: list[Segment]) -> list[Encoded]:
        if not segments:
            return []
        slots = [_slot(segment.row) for segment in segments]
        try:
            # One forward: the network shares a chunk equally among the rows.
            ids = [torch.tensor(segment.ids) for segment in segments]
            hidden: list[Tensor] = []
            if any(segment.row.wants_hidden for segment in segments):
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
        row = segment.row
        if hidden is None or not row.wants_hidden:
            return None
        try:
            row.take_hidden(self._network, _slot(row).length - len(hidden), hidden)
        except Exception as error:
            if is_out_of_memory(error):
                self._free(error)
            return error
        return None

    def _batch(self, rows: Sequence[Row]) -> list[Draft | Exception]:
        network = self._network
        canvases = [row.open(network) for row in rows]
        result = self._denoiser.forward(canvases, [_slot(row) for row in rows])
        network.synchronize()  # up to here nothing has changed, and all may be run again
        return self._denoiser.advance(result)

    def _draw_batch(self, rows: Sequence[Row]) -> list[Draft | Exception]:
        network = self._network
        hidden = torch.cat([row.last_hidden for row in rows])
        return draw_next(network, [row.open(network) for row in rows], hidden)


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


def _slot(row: AnyRow) -> Slot:
    assert row.lease
    return row.lease.slot


def _segments(piece: Piece) -> list[Segment]:
    """A piece, cut where the slot is to be marked."""
    row = piece.row
    assert row.lease
    start, end = row.encoded, row.encoded + piece.count
    cuts = [start, *(mark for mark in row.lease.marks if start < mark < end), end]
    return [Segment(row, row.prefix[a:b].tolist()) for a, b in pairwise(cuts)]
