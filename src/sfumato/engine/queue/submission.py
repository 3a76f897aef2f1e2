"""The part of an engine that takes requests: checks, refusals, deadlines and the queue's limit.

Called from any thread. Knows no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sfumato.api import Model
from sfumato.diffusion.constraints.read import PIECE
from sfumato.engine.circuit import Circuit
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import REFUSALS, EngineDead, NotReady, QueueFull
from sfumato.engine.events import Failed, Terminal
from sfumato.engine.failures import explain, late
from sfumato.engine.handle import AnyHandle, DecisionHandle, DecisionSink, Handle, Sink
from sfumato.engine.job import Job
from sfumato.engine.lifecycle import Inbox
from sfumato.engine.prepare import prepare, prepare_decision, snapshot_points_of
from sfumato.engine.queue.scheduler import Scheduler
from sfumato.engine.queue.slots import Lacks
from sfumato.engine.request import (
    AnyRequest,
    Request,
    TaskRequest,
    check_length,
    check_timeout,
    make_prompt,
)
from sfumato.engine.row import Row
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.works import Prompt


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
            job = prepare_decision(self._model, request, self._longest)
            handle = DecisionHandle(request.id, sink, self._inbox.wake)
            self._put(request, job, handle, since)
            return handle

    def run(self, request: TaskRequest, job: Job, sink: Sink | None) -> Handle:
        with self.refusals(request):
            check_timeout(request.timeout_s)
            since = self._ready_since(request)
            handle = Handle(request.id, sink, self._inbox.wake)
            self._put(request, job, handle, since)
            return handle

    def job(self, request: Request) -> Job:
        """Raises ValueError and TooLarge for a request that cannot be done."""
        given = self._model, request, self._longest, self._snapshot_points
        job = prepare(*given, self._config.max_steps)
        self._check_room(job)
        return job

    def _check_room(self, job: Job) -> None:
        """Raises TooLarge where no slot can ever hold what a task claims, or its questions."""
        claim = job.task.claim
        try:
            self._scheduler.pool.check(claim.positions)
        except TooLarge as error:
            error.prompt_tokens = len(claim.prompt.ids)
            raise
        longest = claim.beside
        if longest > PIECE and (lack := self._lacks([longest], None)) is not None:
            raise TooLarge(
                "questions",
                f"the longest has {longest:,} tokens, and what is kept of them {lack}",
                "shorten it, or lower --slots or --context",
            )

    def _put(self, request: AnyRequest, job: Job, handle: AnyHandle, since: float) -> None:
        self._check_room(job)
        row = Row(request, job, handle, since, self._limit_s(request))
        self._inbox.put(row, self._has_room, self._config.queue)

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
            if isinstance(error, Refused):
                error.recorded = request.id
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
        job, handle = self.job(request), Handle(request.id, sink, self._inbox.wake)
        self._put(request, job, handle, since)
        return handle
