"""Steps of which the host learns while the device is at the next one.

Each call launches a step and reads the results of the step before, so that the device never waits
for the host.  A canvas that has settled meanwhile is in the next step too, which leaves it as it
is.  Tokens that follow a settled canvas into the cache are rows of the step where it allows that.
Decides nothing about rows; the runner calls this where the network's device works by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.commit import Commit
from sfumato.diffusion.step.results import Pending
from sfumato.engine.any_row import AnyRow
from sfumato.engine.recovery import BatchRecovery
from sfumato.engine.row import Row
from sfumato.engine.scheduler import Piece
from sfumato.model.cache import Slot
from sfumato.model.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """Rows of a step that has been launched, and what each of them denoises."""

    pending: Pending
    rows: tuple[Row, ...]
    canvases: tuple[Canvas, ...]
    began: float


@dataclass(frozen=True)
class CommitRow:
    """Tokens of a row's prefix that the step commits."""

    row: Row
    piece: Piece
    canvas: Commit


@dataclass(frozen=True)
class Failures:
    """What failed in a launch, with the errors; the slots of commits that did are empty."""

    rows: list[tuple[Row, Draft | Exception]]
    commits: dict[AnyRow, Exception]


class LateSteps:
    """The steps of one engine."""

    def __init__(
        self, denoiser: Denoiser, free: Callable[[Exception], None], clock: Callable[[], float]
    ) -> None:
        """free: gives back unused memory, after an error for want of it."""
        self._denoiser, self._free, self._clock = denoiser, free, clock
        self._batches = BatchRecovery(self._launch, free)
        self._launched: list[Launched] = []  # in this step
        self._before: list[Launched] = []  # in the last one, whose results are to be read
        self._last_read = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether results of a step have not been read."""
        return bool(self._before)

    def commits(self, pieces: Sequence[Piece]) -> list[CommitRow]:
        """The pieces that may be rows of a step: settled canvases, at the end of a prefix."""
        return [commit for piece in pieces if (commit := self._commit(piece)) is not None]

    def serves(self, rows: Sequence[Row], commits: Sequence[CommitRow]) -> bool:
        """Whether commits can be rows of the step in which these rows, which are open, are
        denoised."""
        return self._denoiser.served_groups(*self._members(rows, commits)) is not None

    def launch(self, rows: Sequence[Row], commits: Sequence[CommitRow]) -> Failures:
        """Launches a step of rows that are open, and of commits that it serves."""
        going = [
            row for row in rows if not (_at_last_step(self._canvas(row)) or row.waits_for_host())
        ]
        failures = Failures([], {})
        for group in self._denoiser.groups(*self._members(going, commits)):
            members = [going[i] for i in group if i < len(going)]
            own = [commits[i - len(going)] for i in group if i >= len(going)]
            if own and self._launch_with(members, own, failures.commits):
                continue
            results = self._batches.run(members)
            failures.rows.extend((row, error) for row, error in results if error is not None)
        return failures

    def _members(
        self, rows: Sequence[Row], commits: Sequence[CommitRow]
    ) -> tuple[list[Canvas], list[Slot]]:
        canvases = [self._canvas(row) for row in rows]
        slots = [_slot(row) for row in (*rows, *(commit.row for commit in commits))]
        return [*canvases, *(commit.canvas for commit in commits)], slots

    def results(self) -> tuple[list[tuple[Row, Draft | Exception]], float]:
        """What the step before the last one gave, of rows that still denoise what they did then;
        and when it began, by the clock. Waits for that step, and not for the last."""
        before, self._before = self._before, self._launched
        self._launched = []
        denoised: list[tuple[Row, Draft | Exception]] = []
        began = self._clock()
        for launched in before:
            began = min(began, max(launched.began, self._last_read))
            results = launched.pending.results()
            for row, canvas, result in zip(launched.rows, launched.canvases, results, strict=False):
                # A row may have ended, or been given another canvas, since the launch.
                if result is not None and row.lease is not None and row.canvas is canvas:
                    denoised.append((row, result))
        if before:
            self._last_read = self._clock()
        return denoised, began

    def _canvas(self, row: Row) -> Canvas:
        return row.open(self._denoiser.network)

    def _commit(self, piece: Piece) -> CommitRow | None:
        """A piece as a row of the step; None where it is no settled canvas at a prefix's end."""
        row, count = piece.row, piece.count
        if not isinstance(row, Row) or row.is_causal or row.encodes_alone or row.lease is None:
            return None
        end = row.encoded + count
        settled = row.encoded >= row.prompt_tokens and count <= row.canvas_length
        marked = any(row.encoded < mark < end for mark in row.lease.marks)
        fits = count <= row.lease.slot.room()  # else an encode raises, and says so
        if not settled or marked or not fits or count != row.pending:
            return None
        config, ids = row.sequence.config, row.prefix[row.encoded : end].tolist()
        return CommitRow(row, piece, Commit(ids, config, self._denoiser.network))

    def _launch_with(
        self, rows: Sequence[Row], commits: Sequence[CommitRow], failed: dict[AnyRow, Exception]
    ) -> bool:
        """Launches rows together with commits; whether the rows have been. Where the commits fail,
        notes the error of each, and their slots are empty."""
        started = False
        try:
            self._start(rows, commits)
            started = True
            for commit in commits:
                _slot(commit.row).advance(commit.canvas.length)
        except Exception as error:
            if is_out_of_memory(error):
                self._free(error)
            elif not started:
                log.exception("a step with %d commits failed; their rows start over", len(commits))
            for commit in commits:
                failed[commit.row] = error
                with suppress(Exception):  # a lost device: the host's side is reset first
                    _slot(commit.row).reset()
        return started

    def _launch(self, rows: Sequence[Row]) -> list[None]:
        self._start(rows, ())
        return [None] * len(rows)

    def _start(self, rows: Sequence[Row], commits: Sequence[CommitRow]) -> None:
        began = self._clock()
        members, slots = self._members(rows, commits)
        pending = self._denoiser.launch(members, slots)
        canvases = tuple(members[: len(rows)])
        for canvas in canvases:
            canvas.launched += 1
        self._launched.append(Launched(pending, tuple(rows), canvases, began))


def _at_last_step(canvas: Canvas) -> bool:
    assert canvas.config.max_steps
    return canvas.launched >= canvas.config.max_steps


def _slot(row: AnyRow) -> Slot:
    assert row.lease
    return row.lease.slot
