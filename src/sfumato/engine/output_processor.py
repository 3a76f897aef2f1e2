"""What follows from a step: events are delivered, rows advance or end.

What raises for one row ends that row and no other. Every row ends here, in exactly one terminal
event. Leases no slots: the scheduler does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import StopReason, TooLarge
from sfumato.engine.any_row import AnyRow
from sfumato.engine.circuit import Circuit
from sfumato.engine.events import DECIDED, Failed, FailureKind, Finished, Terminal
from sfumato.engine.failures import explain
from sfumato.engine.read_turns import ReadResult
from sfumato.engine.recovery import recover_encoding
from sfumato.engine.request import AnyRequest
from sfumato.engine.row import Row
from sfumato.engine.runner import Encoded, StepResults
from sfumato.engine.scheduler import Scheduler
from sfumato.engine.stats import Statistics

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
        self._encoded(results.encoded, results.encode_s)
        if results.denoised:
            for row, result in results.denoised:
                try:
                    if isinstance(result, Exception):
                        raise result
                    # Reads come after it in the step, and count for no reply.
                    self._denoised(row, result, results.began + results.read_s)
                except Exception as error:
                    self.end_with(row, error)
            seconds = self._clock() - results.began - results.read_s
            self._statistics.stepped(len(results.denoised), seconds)
        if results.read:
            self._statistics.totals.read_s += results.read_s
        for read in results.read:
            self._read(read, results.read_s)

    def _encoded(self, encoded: list[Encoded], seconds: float) -> None:
        totals = self._statistics.totals
        for segment, error in encoded:
            if error is None:
                segment.row.took(len(segment.ids))
                totals.encoded_tokens += len(segment.ids)
        self._waited(tuple({segment.row: None for segment, _ in encoded}), seconds)
        for row, reason in recover_encoding(self._scheduler, encoded):
            self.end_with(row, reason)

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
        if row.request.drafts:
            row.handle.deliver(draft)
        if not row.settled:
            return
        settled = row.collect(ids, draft)
        self._statistics.settled(len(ids))
        if settled is not None:
            if row.first_commit_s is None:
                row.first_commit_s = now - row.submitted
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

    # Ends.

    def cancel(self, row: AnyRow) -> None:
        """Ends a row that its client wants no more: a reply as it stands, a decision without
        answers."""
        if isinstance(row, Row):
            self.finish(row, "cancelled")
        else:
            self.fail(row, "cancelled", "the request was cancelled")

    def finish(self, row: Row, reason: StopReason) -> None:
        """Ends a row with its reply as it stands."""
        now = self._clock()
        try:
            terminal = Finished(row.finish(reason, now), row.account_at(now))
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
        if row.handle.deliver(terminal):
            self._statistics.ended(outcome, terminal.account)
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
