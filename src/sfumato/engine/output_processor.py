"""What follows from a step: events go out, rows move on or end, slots come back.

Each row's consequences are its own: what raises here ends that row and no other.  Every row ends
here, in exactly one terminal event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sfumato.diffusion.limits import StopReason, TooLarge
from sfumato.engine.circuit import Circuit
from sfumato.engine.events import Failed, FailureKind, Finished, Terminal
from sfumato.engine.failures import explain, is_out_of_memory
from sfumato.engine.request import Request
from sfumato.engine.row import Row
from sfumato.engine.runner import Encoded, Ran
from sfumato.engine.scheduler import Scheduler
from sfumato.engine.slots import SlotPool
from sfumato.engine.stats import Statistics
from sfumato.model.head import HeadStats

log = logging.getLogger(__name__)

OnFinish = Callable[[Request, Terminal], None]


class OutputProcessor:
    """Settles steps, and lends and takes back the slots that rows need for them."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: SlotPool,
        meters: Statistics,
        circuit: Circuit,
        on_finish: OnFinish | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._statistics, self._circuit = meters, circuit
        self._on_finish, self._clock = on_finish, clock

    def lend(self, row: Row) -> bool:
        """Whether there is a slot for a row now, which then has it."""
        lease = self._pool.lease(row.prefix, row.prepared.need, row.prepared.prompt.marks)
        if lease is not None:
            row.leased(lease, self._clock())
        return lease is not None

    def process(self, ran: Ran) -> None:
        """Takes in what a step found."""
        self._encoded(ran.encoded, ran.encode_s)
        if ran.found:
            for row, found in ran.found:
                try:
                    if isinstance(found, Exception):
                        raise found
                    self._denoised(row, found, ran.began)
                except Exception as error:
                    self.end_with(row, error)
            self._statistics.stepped(len(ran.found), self._clock() - ran.began)

    def _encoded(self, encoded: list[Encoded], seconds: float) -> None:
        failed: dict[Row, Exception] = {}
        for segment, error in encoded:
            if error is None:
                segment.row.took(len(segment.ids))
                self._statistics.totals.encoded_tokens += len(segment.ids)
            else:
                failed[segment.row] = error
        for row in {segment.row: None for segment, _ in encoded}:
            row.waited(seconds)
        self._statistics.totals.encode_s += seconds
        crowded = [row for row, error in failed.items() if is_out_of_memory(error)]
        ended: Row | None = None
        if crowded:  # fewer tokens at once may fit; where they do not, the newest makes room
            if self._scheduler.shrink(sum(len(segment.ids) for segment, _ in encoded)):
                ended = [row for row in self._scheduler.running if row.pending][-1]
        elif encoded:
            self._scheduler.relax()
        for row, error in failed.items():
            if row in crowded:
                again = row is not ended
            else:  # in company the fault may be another's: each starts over by itself, once
                again = not row.alone and len(failed) > 1
                row.alone = True
            try:
                if not (again and self._start_over(row)):
                    self.end_with(row, error)
            except Exception as another:
                self.end_with(row, another)
        if ended is not None and ended not in failed:  # it had no part in this step's work
            self.end_with(ended, failed[crowded[0]])

    def _start_over(self, row: Row) -> bool:
        """A slot anew for a row whose own was emptied."""
        self._take_back(row, keep=False)
        return self.lend(row)

    def _denoised(self, row: Row, found: HeadStats, began: float) -> None:
        draft = row.advance(found)
        now = self._clock()
        row.sequence.stepped(draft, now - began, now - row.submitted)
        if row.request.drafts:
            row.handle.deliver(draft)
        if not row.settled:
            return
        commit = row.collect(draft)
        self._statistics.settled(len(draft.token_ids))
        if commit is not None:
            if row.first_commit_s is None:
                row.first_commit_s = now - row.submitted
            row.handle.deliver(commit)
        if row.reason is not None:
            self.finish(row, row.reason)

    # Ends.

    def finish(self, row: Row, reason: StopReason) -> None:
        """Ends a row with its reply as it stands."""
        now = self._clock()
        try:
            terminal = Finished(row.finish(reason, now), row.account(now))
        except Exception as error:
            self.end_with(row, error)
        else:
            self._end(row, terminal, reason)

    def end_with(self, row: Row, error: Exception) -> None:
        """Ends a row that an exception came of."""
        kind, message = explain(error)
        if kind == "internal":
            log.error("request %s failed", row.request.id, exc_info=error)
        context = error.context if isinstance(error, TooLarge) else None
        self._end(row, Failed(kind, message, row.account(self._clock()), context), kind)

    def fail(self, row: Row, kind: FailureKind, message: str) -> None:
        """Ends a row without a reply."""
        self._end(row, Failed(kind, message, row.account(self._clock())), kind)

    def abandon(self, row: Row, kind: FailureKind, message: str) -> None:
        """Tells that a row fails, and leaves its slot alone, which a step may still be using."""
        self._tell(row, Failed(kind, message, row.account(self._clock())), kind)

    def _end(self, row: Row, terminal: Terminal, outcome: str) -> None:
        self._scheduler.remove(row)
        try:
            self._take_back(row, keep=True)
        finally:
            self._tell(row, terminal, outcome)

    def _take_back(self, row: Row, keep: bool) -> None:
        lease, row.lease = row.lease, None
        if lease is not None:
            self._pool.release(lease, keep)

    def _tell(self, row: Row, terminal: Terminal, outcome: str) -> None:
        if row.handle.deliver(terminal):
            self._statistics.ended(outcome, terminal.account)
            self._circuit.ended(terminal)
            self.tell(row.request, terminal)

    def tell(self, request: Request, terminal: Terminal) -> None:
        """Calls on_finish, whatever it does."""
        if self._on_finish is None:
            return
        try:
            self._on_finish(request, terminal)
        except Exception:
            log.exception("request %s: on_finish failed", request.id)
