"""What follows from a step: events are delivered, rows advance or end.

What raises for one row ends that row and no other. Every row ends here, in exactly one terminal
event. Leases no slots: the scheduler does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sfumato.api import Settled
from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import StopReason, TooLarge
from sfumato.engine.any_row import AnyRow
from sfumato.engine.circuit import Circuit
from sfumato.engine.events import DECIDED, Failed, FailureKind, Finished, Terminal
from sfumato.engine.failures import explain
from sfumato.engine.fill_row import FillRow
from sfumato.engine.fill_turns import FillResult
from sfumato.engine.read_turns import ReadResult
from sfumato.engine.request import AnyRequest
from sfumato.engine.row import Row
from sfumato.engine.runner import Encoded, StepResults
from sfumato.engine.scheduler import Scheduler
from sfumato.engine.stats import Statistics
from sfumato.model.out_of_memory import is_out_of_memory

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

    def process(self, results: StepResults) -> None:
        """Takes in the results of a step."""
        for time in results.late_encodes:  # before results that may end their rows
            self._waited(time.rows, time.seconds)
        self._encoded(results.encoded, results.encode_s + results.write_s)
        after_s = results.read_s + results.fill_s
        for writer, scores in results.written:
            try:
                self._settled(writer, writer.write(scores))
            except Exception as error:
                self.end_with(writer, error)
        if results.denoised:
            before_s = results.write_s + results.draw_s + after_s
            for row, result in results.denoised:
                # All else comes after it in the step, and counts for no reply.
                self._advance(row, result, results.began + before_s)
            seconds = self._clock() - results.began - before_s
            self._statistics.stepped(len(results.denoised), seconds)
        for row, result in results.drawn:
            self._advance(row, result, results.draw_began + after_s)
        if results.read:
            self._statistics.totals.read_s += results.read_s
        for read in results.read:
            self._read(read, results.read_s)
        for fill in results.filled:
            self._filled(fill, results.fill_s)
        steps = sum(len(fill.steps) for fill in results.filled)
        if steps:
            self._statistics.stepped(steps, results.fill_s)

    def _advance(self, row: Row, result: Draft | Exception, began: float) -> None:
        try:
            if isinstance(result, Exception):
                raise result
            self._denoised(row, result, began)
        except Exception as error:
            self.end_with(row, error)

    def _encoded(self, encoded: list[Encoded], seconds: float) -> None:
        totals = self._statistics.totals
        for segment, error in encoded:
            if error is None:
                segment.row.took(len(segment.ids))
                totals.encoded_tokens += len(segment.ids)
        self._waited(tuple({segment.row: None for segment, _ in encoded}), seconds)
        for row, reason in _recover_encoding(self._scheduler, encoded):
            self.end_with(row, reason)
        for row in {segment.row: None for segment, error in encoded if error is None}:
            if isinstance(row, Row) and row.lease is not None and row.is_scored:
                self.finish(row, "max_tokens")

    def _waited(self, rows: Sequence[AnyRow], seconds: float) -> None:
        for row in rows:
            row.waited(seconds)
        self._statistics.totals.encode_s += seconds

    def _denoised(self, row: Row, result: Draft, began: float) -> None:
        draft = row.readable(result)
        now = self._clock()
        row.sequence.stepped(draft, now - began, now - row.submitted)
        # On the host already, and read before a client can write into the draft.
        ids = row.sequence.ids_of(draft) if row.settled else []
        row.guide(draft)
        if row.request.drafts:
            row.handle.deliver(draft)
        if not row.settled:
            return
        if not row.is_causal:
            self._statistics.settled(len(ids))
        self._settled(row, row.collect(ids, draft))

    def _settled(self, row: Row, settled: Settled | None) -> None:
        """Delivers what a canvas adds, if it is there, and ends the reply if it has ended."""
        if settled is not None:
            if row.first_commit_s is None:
                row.first_commit_s = self._clock() - row.submitted
            row.handle.deliver(settled)
        if row.reason is not None:
            self.finish(row, row.reason)

    def _read(self, result: ReadResult, seconds: float) -> None:
        row = result.row
        self._statistics.totals.read_tokens += result.tokens
        try:
            row.had_turns(seconds)
            if result.error is not None:
                raise result.error
            if row.progress.done:
                self._end(row, row.finish(self._clock()), DECIDED)
        except Exception as error:
            self.end_with(row, error)

    def _filled(self, result: FillResult, seconds: float) -> None:
        row, now = result.row, self._clock()
        try:
            if result.error is not None:
                raise result.error
            row.had_step(seconds, bool(result.steps), now)
            draft = row.take(result.steps)
            for canvas, _ in result.steps:
                if canvas.done:
                    self._statistics.settled(canvas.length)
            if draft is not None and row.request.drafts:
                row.handle.deliver(draft)
            if row.done:
                settled, reply = row.finish(now)
                row.handle.deliver(settled)
                self._end(row, Finished(reply, row.account_at(now)), reply.stop_reason)
        except Exception as error:
            self.end_with(row, error)

    # Ends.

    def cancel(self, row: AnyRow) -> None:
        """Ends a row that its client wants no more: a reply as it stands, a fill without texts, a
        decision without answers."""
        if isinstance(row, Row):
            self.finish(row, "cancelled")
        elif isinstance(row, FillRow):
            now = self._clock()
            self._end(row, Finished(row.cancelled(now), row.account_at(now)), "cancelled")
        else:
            self.fail(row, "cancelled", "the request was cancelled")

    def finish(self, row: Row, reason: StopReason) -> None:
        """Ends a row with its reply as it stands."""
        now = self._clock()
        try:
            scores = None if row.scorer is None else row.scorer.scores()
            vector = None if row.pooler is None else row.pooler.vector()
            terminal = Finished(row.finish(reason, now), row.account_at(now), scores, vector)
        except Exception as error:
            self.end_with(row, error)
        else:
            self._end(row, terminal, reason)

    def end_with(self, row: AnyRow, error: Exception) -> None:
        """Ends a row that an exception was raised for."""
        kind, message = explain(error)
        if kind == "internal":
            log.error("request %s failed", row.request.id, exc_info=error)
        context = error.context if isinstance(error, TooLarge) else None
        self._end(row, Failed(kind, message, row.account_at(self._clock()), context), kind)

    def fail(self, row: AnyRow, kind: FailureKind, message: str) -> None:
        """Ends a row without a reply."""
        self._end(row, Failed(kind, message, row.account_at(self._clock())), kind)

    def abandon(self, row: AnyRow, kind: FailureKind, message: str) -> None:
        """Delivers the failure of a row, but keeps its slot, which a step may still be using."""
        self._deliver(row, Failed(kind, message, row.account_at(self._clock())), kind)

    def _end(self, row: AnyRow, terminal: Terminal, outcome: str) -> None:
        try:
            self._scheduler.remove(row)
        finally:
            self._deliver(row, terminal, outcome)

    def _deliver(self, row: AnyRow, terminal: Terminal, outcome: str) -> None:
        def count() -> None:  # a client that has its reply finds it in the totals
            self._statistics.ended(outcome, terminal.account)

        if row.handle.deliver(terminal, count):
            self._circuit.ended(terminal)
            self.report(row.request, terminal)

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
) -> list[tuple[AnyRow, Exception]]:
    """Lets the rows start over whose encoding failed; returns those that must end instead, with
    the reason. encoded: all segments of a step, whether they failed or not."""
    running, chunk = scheduler.running, scheduler.chunk
    failed = {segment.row: error for segment, error in encoded if error is not None}
    short = [row for row, error in failed.items() if is_out_of_memory(error)]
    newest: AnyRow | None = None
    if short:  # fewer tokens at once may fit; where they do not, the newest row makes room
        if chunk.shrink(sum(len(segment.ids) for segment, _ in encoded), running):
            newest = [row for row in running if row.pending][-1]
    elif encoded:
        chunk.succeeded(running)
    ending: list[tuple[AnyRow, Exception]] = []
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
