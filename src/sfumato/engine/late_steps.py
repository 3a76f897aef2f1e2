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

Stamp = torch.cuda.Event | float


@dataclass(frozen=True)
class EncodeTime:
    """What an encode took, and the rows that had a part in it."""

    rows: tuple[Row, ...]
    seconds: float


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
                    times.append(EncodeTime(rows, ended - began))
                elif ended.query():
                    times.append(EncodeTime(rows, began.elapsed_time(ended) / 1e3))
                else:
                    break
                del self._launched[0]
            return times
        self._launched.clear()
        return times


log = logging.getLogger(__name__)

Item = tuple[Row, Canvas]
Denoised = tuple[Row, Canvas, Draft | Exception]


@dataclass(frozen=True)
class Launched:
    """Canvases of a step that has been launched, and whose they are."""

    pending: Pending
    items: tuple[Item, ...]
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

    items: list[Denoised]
    commits: dict[Row, Exception]


class LateSteps:
    """The steps of one engine."""

    def __init__(
        self, denoiser: Denoiser, free: Callable[[Exception], None], clock: Callable[[], float]
    ) -> None:
        """free: gives back unused memory, after an error for want of it."""
        self._denoiser, self._free, self._clock = denoiser, free, clock
        self._batches = BatchRecovery(self._launch, free, lambda item: item[0])
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

    def serves(self, items: Sequence[Item], commits: Sequence[CommitRow]) -> bool:
        """Whether commits can be rows of the step in which these canvases are denoised."""
        return self._denoiser.served_groups(*_members(items, commits)) is not None

    def launch(self, items: Sequence[Item], commits: Sequence[CommitRow]) -> Failures:
        """Launches a step of canvases that are prepared, and of commits that it serves."""
        going = [(row, canvas) for row, canvas in items if row.may_launch(canvas)]
        failures = Failures([], {})
        for group in self._denoiser.groups(*_members(going, commits)):
            members = [going[i] for i in group if i < len(going)]
            own = [commits[i - len(going)] for i in group if i >= len(going)]
            if own and self._launch_with(members, own, failures.commits):
                continue
            results = self._batches.run(members)
            failures.items.extend((*item, error) for item, error in results if error is not None)
        return failures

    def results(self) -> tuple[list[Denoised], float]:
        """What the step before the last one gave, of canvases that their tasks still denoise; and
        when it began, by the clock. Waits for that step, and not for the last."""
        before, self._before = self._before, self._launched
        self._launched = []
        denoised: list[Denoised] = []
        began = self._clock()
        for launched in before:
            began = min(began, max(launched.began, self._last_read))
            results = launched.pending.results()
            for (row, canvas), result in zip(launched.items, results, strict=False):
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
        return CommitRow(row, piece, Commit(ids, config, self._denoiser.network))

    def _launch_with(
        self, items: Sequence[Item], commits: Sequence[CommitRow], failed: dict[Row, Exception]
    ) -> bool:
        """Launches canvases together with commits; whether the canvases have been. Where the
        commits fail, notes the error of each, and their slots are empty."""
        started = False
        try:
            self._start(items, commits)
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

    def _launch(self, items: Sequence[Item]) -> list[None]:
        self._start(items, ())
        return [None] * len(items)

    def _start(self, items: Sequence[Item], commits: Sequence[CommitRow]) -> None:
        began = self._clock()
        pending = self._denoiser.launch(*_members(items, commits))
        for _, canvas in items:
            canvas.launched += 1
        self._launched.append(Launched(pending, tuple(items), began))


def _members(
    items: Sequence[Item], commits: Sequence[CommitRow]
) -> tuple[list[Canvas], list[Slot]]:
    slots = [_slot(row) for row in (*(row for row, _ in items), *(c.row for c in commits))]
    return [*(canvas for _, canvas in items), *(commit.canvas for commit in commits)], slots


def _slot(row: Row) -> Slot:
    assert row.lease
    return row.lease.slot
