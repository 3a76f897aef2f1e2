"""What follows from a step: tasks get their results and go on, events are delivered, rows end.

What raises for one row ends that row and no other. Every row ends here, in exactly one terminal
event. Leases no slots: the scheduler does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.engine.circuit import Circuit
from sfumato.engine.events import Failed, FailureKind, Terminal, explain
from sfumato.engine.late_steps import Denoised, EncodeTime
from sfumato.engine.queue.scheduler import Scheduler
from sfumato.engine.request import AnyRequest
from sfumato.engine.row import Row
from sfumato.engine.runner import Encoded, Results, Scored
from sfumato.engine.stats import Statistics
from sfumato.model.devices import is_out_of_memory
from sfumato.refused import Refused
from sfumato.tasks.works import Draw, Encode, Unfinished, Work

log = logging.getLogger(__name__)

OnFinish = Callable[[AnyRequest, Terminal], None]


class OutputProcessor:
    """Turns the results of a step into events."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: Statistics,
        circuit: Circuit,
        on_finish: OnFinish | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._statistics, self._circuit = statistics, circuit
        self._on_finish, self._clock = on_finish, clock

    # The phases of a step.

    def begun(self, row: Row) -> None:
        """Begins the task of a row that has its slot."""
        row.run = row.task.run()
        self._resume(row, None)

    def process(self, results: Results) -> None:
        """What follows from a phase."""
        for row, error in results.failed:
            self.end_with(row, error)
        self._encoded(results.encoded, results.times)
        self._drafted(results.drafts, results.began)
        self._statistics.totals.read_s += results.score_s
        for scored in results.scored:
            self._scored(scored, results.score_s)

    def _drafted(self, drafts: Sequence[Denoised], began: float) -> None:
        """Canvases have had a step, or a token was drawn by the head alone."""
        rows: dict[Row, list[tuple[Canvas, Draft | Exception]]] = {}
        for row, canvas, result in drafts:
            rows.setdefault(row, []).append((canvas, result))
        seconds, denoised = self._clock() - began, 0
        for row, own in rows.items():
            is_step = not isinstance(row.work, Draw)
            denoised += len(own) if is_step else 0
            if row.lease is None:  # its commit failed
                continue
            row.times.denoise_s += seconds
            row.step_s.append(seconds)
            for canvas, result in own:
                if isinstance(result, Exception):
                    self.end_with(row, result)
                    break
                row.answer(canvas, result)
            else:
                self._go_on(row)
            for canvas in (canvas for canvas, _ in own if canvas.done and is_step):
                self._statistics.settled(canvas.length)  # a task may have ended it
        if denoised:
            self._statistics.stepped(denoised, seconds)

    def _scored(self, scored: Scored, seconds: float) -> None:
        row = scored.row
        self._statistics.totals.read_tokens += scored.tokens
        row.reads += row.score.collect()
        row.times.denoise_s += seconds
        if scored.is_read:
            row.step_s.append(seconds)
        if scored.error is not None:
            self.end_with(row, scored.error)
        else:
            self._go_on(row)

    def _encoded(self, encoded: list[Encoded], times: Sequence[EncodeTime]) -> None:
        totals = self._statistics.totals
        for segment, error in encoded:
            if error is None:
                segment.row.advance(len(segment.ids))
                totals.encoded_tokens += len(segment.ids)
        for rows, seconds in times:  # before results that may end their rows
            for row in rows:
                row.waited(seconds)
            totals.encode_s += seconds
        for row, reason in _recover_encoding(self._scheduler, encoded):
            self.end_with(row, reason)
        for row in {segment.row: None for segment, error in encoded if error is None}:
            if row.lease is not None and isinstance(row.work, Encode):
                self._go_on(row)

    def _go_on(self, row: Row) -> None:
        """Lets the task of a row go on whose work may be done."""
        if not row.is_answered:
            return
        try:
            answers = row.answers
        except Exception as error:
            self.end_with(row, error)
        else:
            self._resume(row, answers)

    def _resume(self, row: Row, result: Any) -> None:
        """Gives a task a result, delivers its events, and takes its next work."""
        assert row.run is not None
        try:
            while True:
                yielded = row.run.send(result)
                if isinstance(yielded, Work):
                    row.take(yielded)
                    if not row.is_answered:
                        return
                    result = row.answers
                else:
                    self._deliver_event(row, yielded)
                    result = None
        except StopIteration as end:
            self._conclude(row, end.value)
        except Exception as error:
            self.end_with(row, error)

    def _deliver_event(self, row: Row, event: Any) -> None:
        if isinstance(event, Draft):
            if row.times.first_draft_s is None:
                row.times.first_draft_s = self._clock() - row.submitted
            if row.job.wants_drafts:
                row.handle.deliver(event)
            return
        if row.first_commit_s is None:
            row.first_commit_s = self._clock() - row.submitted
        row.handle.deliver(event)

    # Ends.

    def cancel(self, row: Row) -> None:
        """Ends a row that its client wants no more, with the outcome of its task as it stands."""
        try:
            outcome = row.task.stopped()
        except Unfinished as nothing:
            self.fail(row, "cancelled", str(nothing))
        except Exception as error:
            self.end_with(row, error)
        else:
            self._conclude(row, outcome)

    def _conclude(self, row: Row, outcome: Any) -> None:
        """Ends a row with the outcome of its task."""
        now = self._clock()
        try:
            row.times.total_s = now - row.submitted
            terminal = row.job.conclude(outcome, row.account_at(now))
        except Exception as error:
            self.end_with(row, error)
        else:
            self._end(row, terminal)

    def end_with(self, row: Row, error: Exception) -> None:
        """Ends a row that an exception was raised for."""
        kind, message = explain(error)
        if kind == "internal":
            log.error("request %s failed", row.request.id, exc_info=error)
        # A copy: the error itself holds the frames that it went through, and their tensors.
        refused = copy(error) if isinstance(error, Refused) else None
        self._end(row, Failed(kind, message, row.account_at(self._clock()), refused))

    def fail(self, row: Row, kind: FailureKind, message: str) -> None:
        """Ends a row without a reply."""
        self._end(row, Failed(kind, message, row.account_at(self._clock())))

    def abandon(self, row: Row, kind: FailureKind, message: str) -> None:
        """Delivers the failure of a row, but keeps its slot, which a step may still be using."""
        self._deliver(row, Failed(kind, message, row.account_at(self._clock())))

    def _end(self, row: Row, terminal: Terminal) -> None:
        try:
            self._scheduler.remove(row)
        finally:
            self._deliver(row, terminal)

    def _deliver(self, row: Row, terminal: Terminal) -> None:
        def count() -> None:  # first: a client that has its reply finds it in totals and metrics
            self._statistics.ended(terminal.outcome, terminal.account)
            self.report(row.request, terminal)

        if row.handle.deliver(terminal, count):
            self._circuit.ended(terminal)

    def report(self, request: AnyRequest, terminal: Terminal) -> None:
        """Calls on_finish with the end of a request; what on_finish raises is logged."""
        if self._on_finish is None:
            return
        try:
            self._on_finish(request, terminal)
        except Exception:
            log.exception("request %s: on_finish failed", request.id)


def _recover_encoding(
    scheduler: Scheduler, encoded: Sequence[Encoded]
) -> list[tuple[Row, Exception]]:
    """Lets the rows start over whose encoding failed; returns those that must end instead, with
    the reason. encoded: all segments of a step, whether they failed or not."""
    running, chunk = scheduler.running, scheduler.chunk
    failed = {segment.row: error for segment, error in encoded if error is not None}
    short = [row for row, error in failed.items() if is_out_of_memory(error)]
    newest: Row | None = None
    if short:  # fewer tokens at once may fit; where they do not, the newest row makes room
        if chunk.shrink(sum(len(segment.ids) for segment, _ in encoded), running):
            newest = [row for row in running if row.pending][-1]
    elif encoded:
        chunk.succeeded(running)
    ending: list[tuple[Row, Exception]] = []
    for row, error in failed.items():
        if row in short:
            may_restart = row is not newest
        else:  # the fault may be another row's: each starts over by itself, once
            may_restart = not row.encodes_alone and len(failed) > 1
            row.encodes_alone = True
        try:
            if not (may_restart and scheduler.restart(row)):
                ending.append((row, error))
        except Exception as second_error:
            ending.append((row, second_error))
    if newest is not None and newest not in failed:  # it had no part in this step's work
        ending.append((newest, failed[short[0]]))
    return ending
