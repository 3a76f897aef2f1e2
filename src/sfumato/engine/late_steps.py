"""Steps of canvases, from their launch until the host learns what became of them.

Where steps are captured, the host learns while the device is at the next one: each call launches a
step and reads the results of the step before, so that the device never waits for the host.  A
canvas that has settled meanwhile is in the next step too, which leaves it as it is.  Tokens that
follow a settled canvas into the cache are rows of the step where it allows that.  Elsewhere a step
is launched and read at once.  Decides nothing about rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import Commit
from sfumato.diffusion.step.denoiser import Pending
from sfumato.engine.queue.scheduler import Piece
from sfumato.engine.recovery import BatchRecovery
from sfumato.engine.row import Row
from sfumato.model.cache import Slot
from sfumato.model.devices import is_out_of_memory

log = logging.getLogger(__name__)

Stamp = torch.cuda.Event | float


EncodeTime = tuple[tuple[Row, ...], float]
"""The rows that had a part in an encode, and its seconds."""


class EncodeTimes:
    """The encodes of one device, from their launch until the device has done them."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._launched: list[tuple[tuple[Row, ...], Stamp, Stamp]] = []

    def stamp(self) -> Stamp:
        """When the device has done what was launched so far."""
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return self._clock()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def add(self, rows: Sequence[Row], began: Stamp) -> None:
        """Notes an encode, all of which has been launched since `began`."""
        self._launched.append((tuple(dict.fromkeys(rows)), began, self.stamp()))

    def done(self) -> list[EncodeTime]:
        """The encodes that the device has done since the last call."""
        times: list[EncodeTime] = []
        with suppress(RuntimeError):  # a lost device, which the step reports
            while self._launched:
                rows, began, ended = self._launched[0]
                if isinstance(began, float) or isinstance(ended, float):
                    assert isinstance(began, float) and isinstance(ended, float)
                    times.append((rows, ended - began))
                elif ended.query():
                    times.append((rows, began.elapsed_time(ended) / 1e3))
                else:
                    break
                del self._launched[0]
            return times
        self._launched.clear()
        return times


Item = tuple[Row, Canvas]
Denoised = tuple[Row, Canvas, Draft | Exception]


CommitRow = tuple[Piece, Commit]
"""Tokens of a row's prefix that the step commits, and the canvas that stands for them."""


class Steps:
    """The steps of one engine."""

    def __init__(
        self, denoiser: Denoiser, free: Callable[[Exception], None], clock: Callable[[], float]
    ) -> None:
        """free: gives back unused memory, where an error was for want of it."""
        self._denoiser, self._free, self._clock = denoiser, free, clock
        self.late = denoiser.graphs is not None  # whether the host is a step behind
        self._batches = BatchRecovery(self._launch, free, lambda item: item[0])
        # Of this step, and of the last one, whose results are to be read: what has been launched,
        # canvases and whose they are, and when it began.
        self._launched: list[tuple[Pending, Sequence[Item], float]] = []
        self._before: list[tuple[Pending, Sequence[Item], float]] = []
        self._last_read = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether results of a step have not been read."""
        return bool(self._before)

    def commits(self, pieces: Sequence[Piece]) -> list[CommitRow]:
        """The pieces that may be rows of a step: settled canvases, at the end of a prefix."""
        given = map(self._commit, pieces if self.late else ())
        return [commit for commit in given if commit is not None]

    def serves(self, items: Sequence[Item], commits: Sequence[CommitRow]) -> bool:
        """Whether commits can be rows of the step in which these canvases are denoised."""
        return self._denoiser.groups(*_members(items, commits)) is not None

    def launch(
        self, items: Sequence[Item], commits: Sequence[CommitRow]
    ) -> tuple[list[Denoised], dict[Row, Exception]]:
        """Launches a step of canvases that are prepared, and of commits that it serves. Returns
        what failed, with the errors; the slots of commits that did are empty."""
        going = [(row, canvas) for row, canvas in items if row.may_launch(canvas)]
        failed: list[Denoised] = []
        failed_commits: dict[Row, Exception] = {}
        all_rows = [range(len(going) + len(commits))]
        for group in self._denoiser.groups(*_members(going, commits)) or all_rows:
            members = [going[i] for i in group if i < len(going)]
            own = [commits[i - len(going)] for i in group if i >= len(going)]
            if own and self._launch_with(members, own, failed_commits):
                continue
            results = self._batches.run(members)
            failed.extend((*item, error) for item, error in results if error is not None)
        return failed, failed_commits

    def results(self) -> tuple[list[Denoised], float]:
        """What the last step gave, or, where steps are late, the one before, of canvases that
        their tasks still denoise; and when it began, by the clock. Waits for no later step."""
        before, self._before, self._launched = self._before, self._launched, []
        if not self.late:
            before, self._before = self._before, []
        denoised: list[Denoised] = []
        began = self._clock()
        for pending, items, launched in before:
            began = min(began, max(launched, self._last_read))
            for (row, canvas), result in zip(items, pending.results(), strict=False):
                # A row may have ended, or gone on with something else, since the launch.
                if result is not None and row.lease is not None and canvas in row.unanswered:
                    denoised.append((row, canvas, result))
        if before:
            self._last_read = self._clock()
        return denoised, began

    def _commit(self, piece: Piece) -> CommitRow | None:
        """A piece as a row of the step; None where it is no settled canvas at a prefix's end."""
        row, count, config = piece.row, piece.count, piece.row.last_config
        if config is None or row.want is not None or row.encodes_alone or row.lease is None:
            return None
        assert config.canvas_length
        end = row.encoded + count
        settled = row.encoded >= row.prompt_tokens and count <= config.canvas_length
        marked = any(row.encoded < mark < end for mark in row.lease.marks)
        fits = count <= row.lease.slot.room()  # else an encode raises, and says so
        if not settled or marked or not fits or count != row.pending:
            return None
        ids = row.prefix[row.encoded : end].tolist()
        return piece, Commit(ids, config, self._denoiser.network)

    def _launch_with(
        self, items: Sequence[Item], commits: Sequence[CommitRow], failed: dict[Row, Exception]
    ) -> bool:
        """Launches canvases together with commits; whether the canvases have been. Where the
        commits fail, notes the error of each, and their slots are empty."""
        started = False
        try:
            self._start(items, commits)
            started = True
            for piece, canvas in commits:
                piece.row.slot.advance(canvas.length)
        except Exception as error:
            self._free(error)
            if not (started or is_out_of_memory(error)):
                log.exception("a step with %d commits failed; their rows start over", len(commits))
            for piece, _ in commits:
                failed[piece.row] = error
                with suppress(Exception):  # a lost device: the host's side is reset first
                    piece.row.slot.reset()
        return started

    def _launch(self, items: Sequence[Item]) -> list[None]:
        self._start(items, ())
        return [None] * len(items)

    def _start(self, items: Sequence[Item], commits: Sequence[CommitRow]) -> None:
        began = self._clock()
        pending = self._denoiser.launch(*_members(items, commits))
        for _, canvas in items:
            canvas.launched += 1
        self._launched.append((pending, items, began))


def _members(
    items: Sequence[Item], commits: Sequence[CommitRow]
) -> tuple[list[Canvas], list[Slot]]:
    canvases = [*(canvas for _, canvas in items), *(canvas for _, canvas in commits)]
    return canvases, [*(row.slot for row, _ in items), *(piece.row.slot for piece, _ in commits)]
