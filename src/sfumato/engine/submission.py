"""The part of an engine that takes requests: checks, refusals, deadlines and the queue's limit.

Called from any thread. Knows no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from sfumato.api import Model
from sfumato.diffusion.constraints.decision_settings import DecisionSettings
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.limits import TooLarge
from sfumato.engine.any_row import AnyRow
from sfumato.engine.circuit import Circuit
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.decision_row import DecisionRow, PreparedDecision
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import REFUSALS, EngineDead, NotReady, QueueFull
from sfumato.engine.events import Failed, Terminal
from sfumato.engine.failures import explain, late
from sfumato.engine.fill_request import PreparedFill, prepare_fill
from sfumato.engine.fill_row import FillRow
from sfumato.engine.handle import DecisionHandle, DecisionSink, Handle, Sink
from sfumato.engine.inbox import Inbox
from sfumato.engine.request import (
    AnyRequest,
    Prepared,
    Prompt,
    Request,
    check_length,
    check_timeout,
    make_prompt,
    prepare,
    snapshot_points_of,
)
from sfumato.engine.row import Row
from sfumato.engine.scheduler import Scheduler
from sfumato.engine.slots import Lacks


class Submission:
    """Prepares requests and puts them into an inbox, or refuses them."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        inbox: Inbox,
        scheduler: Scheduler,
        circuit: Circuit,
        report: Callable[[AnyRequest, Terminal], None],
        has_died: Callable[[], bool],
        lacks: Lacks,
        clock: Callable[[], float],
    ) -> None:
        """report: called with each request that is refused, and its `Failed`; has_died: whether an
        error has ended the engine, so that a refusal is the engine's own failure; lacks: of a long
        question, which takes as much as a larger slot of its length."""
        self._model, self._config, self._inbox = model, config, inbox
        self._scheduler, self._circuit = scheduler, circuit
        self._report, self._has_died, self._clock = report, has_died, clock
        self._lacks = lacks
        self._longest, self._snapshot_points = scheduler.pool.longest, snapshot_points_of(model)

    def submit(self, request: Request, sink: Sink | None) -> Handle:
        with self.refusals(request):
            return self._submit(request, sink)

    def offer(self, request: Request, sink: Sink | None) -> Handle | None:
        with self.refusals(request):
            try:
                return self._submit(request, sink)
            except QueueFull:
                return None

    def decide(self, request: DecisionRequest, sink: DecisionSink | None) -> DecisionHandle:
        with self.refusals(request):
            since = self._ready_since(request)
            prepared = self._prepared_decision(request)
            handle = DecisionHandle(request.id, sink, self._inbox.wake)
            row = DecisionRow(request, prepared, handle, since, self._limit_s(request))
            self._inbox.put(row, self._has_room, self._config.queue)
            return handle

    def _prepared_decision(self, request: DecisionRequest) -> PreparedDecision:
        """Raises ValueError and TooLarge for a decision that cannot be done."""
        check_timeout(request.timeout_s)
        names = (field.name for field in fields(DecisionSettings))
        settings = DecisionSettings(**{name: getattr(request, name) for name in names})
        plan = self._model.plan_decision(request.state, request.questions, settings, self._longest)
        pool, longest = self._scheduler.pool, max((len(read.ids) for read in plan.reads), default=0)
        pool.check(len(plan.prefix))
        if longest > PIECE and (lack := self._lacks([longest], None)) is not None:
            raise TooLarge(
                f"questions: the longest has {longest:,} tokens, and what is kept of them {lack}; "
                "shorten it, or lower --slots or --context"
            )
        return PreparedDecision(plan, self._model.family.name)

    def prepared(self, request: Request) -> Prepared | PreparedFill:
        """Raises ValueError and TooLarge for a request that cannot be done."""
        most = self._config.max_steps
        if request.parts is not None:
            fill = prepare_fill(self._model, request, self._longest, self._snapshot_points, most)
            self._scheduler.pool.check(len(fill.prompt.ids))
            return fill
        prepared = prepare(self._model, request, self._longest, self._snapshot_points, most)
        try:
            self._scheduler.pool.check(prepared.need)
        except TooLarge as error:
            error.prompt_tokens = len(prepared.prompt.ids)
            raise
        return prepared

    def prompt(self, request: Request) -> Prompt:
        return make_prompt(self._model, request, self._longest, self._snapshot_points)

    def check_length(self, text: str, field: str) -> None:
        check_length(self._model, text, self._longest, field)

    def late(self, request: AnyRequest) -> str | None:
        """Why the deadline ends a request that is not submitted yet; None before it."""
        return late(request.since, self._limit_s(request), self._clock())

    @contextmanager
    def refusals(self, request: AnyRequest) -> Iterator[None]:
        """Reports a refusal that is raised within."""
        try:
            yield
        except REFUSALS as error:
            kind, message = explain(error)
            own_fault = self._has_died() and isinstance(error, EngineDead)
            self._report(request, Failed("internal" if own_fault else kind, message))
            raise

    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._inbox) + len(self._scheduler.waiting)

    def _has_room(self) -> bool:
        # Those for whom a slot is free do not wait; the next step takes them.
        free = max(0, self._config.slots - len(self._scheduler.running))
        return self.waiting() < self._config.queue + free

    def _limit_s(self, request: AnyRequest) -> float | None:
        limits = (request.timeout_s, self._config.request_timeout_s)
        return min((s for s in limits if s is not None), default=None)

    def _ready_since(self, request: AnyRequest) -> float:
        """When the waiting time of a request began. Raises NotReady while none is taken."""
        if self._inbox.closed is None and self._circuit.reason is not None:
            raise NotReady(self._circuit.reason, self._circuit.retry_s())
        # Before the prompt is made: the time for that is the client's waiting time too.
        return self._clock() if request.since is None else request.since

    def _submit(self, request: Request, sink: Sink | None) -> Handle:
        since = self._ready_since(request)
        prepared, handle = self.prepared(request), Handle(request.id, sink, self._inbox.wake)
        row: AnyRow
        if isinstance(prepared, PreparedFill):
            fills, limit = self._model.fills, self._limit_s(request)
            row = FillRow(request, prepared, fills, handle, since, limit)
        else:
            row = Row(request, prepared, handle, since, self._limit_s(request))
        self._inbox.put(row, self._has_room, self._config.queue)
        return handle
