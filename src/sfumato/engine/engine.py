"""The engine: many requests, one model. `step()` is schedule, run, process outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from sfumato.api import Model, Reply
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine.circuit import Circuit, FileCheck, probe
from sfumato.engine.client import ServedModel
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.engine_config import TURN, EngineConfig
from sfumato.engine.errors import EngineDead, QueueFull
from sfumato.engine.events import Completed, Failed
from sfumato.engine.failures import late
from sfumato.engine.handle import DecisionHandle, DecisionSink, Handle, Sink
from sfumato.engine.job import Job
from sfumato.engine.lifecycle import Inbox, Lifecycle
from sfumato.engine.memory.device_memory import used_memory
from sfumato.engine.memory.guard import MemoryGuard
from sfumato.engine.output_processor import OnFinish, OutputProcessor
from sfumato.engine.queue.scheduler import Scheduler
from sfumato.engine.queue.slots import make_pool
from sfumato.engine.queue.submission import Submission
from sfumato.engine.request import AnyRequest, Request, TaskRequest
from sfumato.engine.row import Row
from sfumato.engine.runner import Runner
from sfumato.engine.stats import EngineState, Health, Statistics, slot_states
from sfumato.tasks.works import Prompt, Task

JOIN_S = 30.0  # how long a step under way may hold up `close`


class Engine:
    """Serves requests with one model, whose network no other code may use meanwhile. An
    `EngineClient` for those who send requests.

    Either `start()` gives it a thread, or its owner calls `step()`. Any thread may submit.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        on_finish: OnFinish | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_finish: called once for each request, with its terminal event in the engine's thread,
        or, where it is refused, with a `Failed` that has no account in the caller's.

        Raises EngineError where the slots do not fit the memory."""
        self.model, self.config = model, config or EngineConfig()
        self.served = ServedModel.of(model)
        self._clock, self._began = clock, clock()
        self._guard = MemoryGuard(model.network, self.config)
        self._pool = make_pool(model.network, self.config, self._guard)
        self._statistics, self._inbox = Statistics(clock), Inbox()
        most_read = TURN if model.network.device.type == "cpu" else None
        self._scheduler = Scheduler(self._pool, self.config.prefill_chunk, clock, most_read)
        self._runner = Runner(model.network, self.config.slots, self.config.prefill_chunk, clock)
        self._circuit = Circuit(lambda: probe(model), clock)
        self._outputs = OutputProcessor(
            self._scheduler, self._statistics, self._circuit, on_finish, clock
        )
        self._files = FileCheck(model.network.files, clock)
        self._lifecycle = Lifecycle(self._inbox, self._scheduler, self._outputs)
        self._submission = Submission(
            model,
            self.config,
            self._inbox,
            self._scheduler,
            self._circuit,
            self._outputs.report,
            lambda: self._lifecycle.has_died,
            self._guard.lacks,
            clock,
        )
        self._publish()

    # For clients: any thread. `EngineClient` says what each does.

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        return self._submission.submit(request, sink)

    def offer(self, request: Request, sink: Sink | None = None) -> Handle | None:
        return self._submission.offer(request, sink)

    def decide(self, request: DecisionRequest, sink: DecisionSink | None = None) -> DecisionHandle:
        return self._submission.decide(request, sink)

    def run(
        self, task: Task, request: TaskRequest | None = None, sink: Sink | None = None
    ) -> Handle:
        """Queues a task of any kind, which ends in `Completed` or `Failed`; its other events go to
        the sink as they are. Raises what `submit` raises."""
        job = Job(task, Completed, wants_drafts=True)
        return self._submission.run(request or TaskRequest(), job, sink)

    def try_grammar(self, source: Source, client: str) -> Future[Any]:
        cache = self.model.grammars.cache
        cache.guard(QueueFull)
        return cache.tried(source, client)

    def check(self, request: Request) -> None:
        with self.refusals(request):
            self._submission.job(request)

    def drop(self, request: Request, terminal: Failed) -> None:
        self._outputs.report(request, terminal)

    def late(self, request: Request) -> str | None:
        return self._submission.late(request)

    def refusals(self, request: AnyRequest) -> AbstractContextManager[None]:
        return self._submission.refusals(request)

    def prompt(self, request: Request) -> Prompt:
        with self.refusals(request):
            return self._submission.prompt(request)

    def check_length(self, text: str, field: str) -> None:
        self._submission.check_length(text, field)

    def now(self) -> float:
        return self._clock()

    def generate(self, request: Request) -> Reply:
        """The reply to a request. Raises what `submit` raises, and RequestFailed."""
        handle = self.submit(request)
        while self._lifecycle.thread is None and handle.terminal is None:
            self.step()
        return handle.result()

    @property
    def death(self) -> str | None:
        return self._lifecycle.death

    def health(self) -> Health:
        reason = self.death or self._inbox.closed or self._circuit.reason
        return Health(
            reason is None,
            reason,
            self._clock() - self._began,
            self._submission.waiting(),
            len(self._scheduler.running),
        )

    def state(self) -> EngineState:
        now = self._clock()
        return EngineState(
            self._submission.waiting(),
            tuple(row.state(now) for row in tuple(self._scheduler.running)),
            self._slots,
            self._statistics.copy(),
            self._statistics.speeds(),
            self._statistics.history(),
            *self._slot_bytes,
            self._guard.view,
            self._circuit.state,
        )

    def used_memory(self) -> int | None:
        return used_memory(self.model.network.device)

    def reset_prefix_cache(self) -> Future[int]:
        return self._inbox.put_reset()

    # For the owner.

    def warm_up(self) -> None:
        """On a GPU, compiles the kernels of usual steps, for which else the first requests wait:
        up to minutes where nothing was compiled before. Before `start`, without requests."""
        config = SamplerConfig(canvas_length=self.model.config.canvas_length)
        with self._lifecycle.fatal(after=self._publish):
            self._runner.warm_up(self._pool.empty_slots, config.over(self.model.sampler_defaults))

    def start(self) -> Engine:
        """Gives the engine its thread."""
        self._lifecycle.start(self._turn, lambda: self._circuit.reason is not None)
        return self

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
        """Takes no more requests, waits up to drain_s for those accepted, and fails the rest.

        join_s: how long a step under way may hold this up. Past it all requests are failed all the
        same, and the step is left to itself.
        """
        self._lifecycle.drain(drain_s, self.step)
        self.model.grammars.cache.close(EngineDead(self._inbox.closed or "the engine was closed"))
        if self._lifecycle.stop(join_s):
            self._publish()

    def step(self) -> bool:
        """One step of all rows; False where there is nothing to do. Not after `start`.

        Each of its phases is scheduled, run, and its results processed, so that tasks go on between
        phases: a commit and the first step of the next canvas share a step."""
        with self._lifecycle.fatal(after=self._publish):
            schedule, runner, outputs = self._scheduler, self._runner, self._outputs
            self._admit()
            pieces = schedule.encode()
            encoded = runner.encode(pieces)
            outputs.encoded(encoded)
            canvases = schedule.denoise(self._is_wanted)
            outputs.denoised(runner.denoise(canvases, encoded.commits))
            rows = schedule.draw(self._is_wanted)
            outputs.drawn(runner.draw(rows))
            share = schedule.score(self._is_wanted, sum(c.length for _, c in canvases))
            outputs.scored(runner.score(share))
            self._publish()
            runner.between_steps()
            return bool(pieces or canvases or rows or share.rows or runner.is_ahead)

    def _admit(self) -> None:
        """Takes in what was submitted, and begins the tasks for which there is a slot."""
        self._take_in()
        for row, error in self._scheduler.admit():
            if error is None:
                self._outputs.begun(row)
            else:
                self._outputs.end_with(row, error)

    def _take_in(self) -> None:
        """Takes in what was submitted, and ends what has been cancelled or is late. Raises
        FileTruncated."""
        for reset in self._inbox.take(self._scheduler.waiting):
            reset.set_result(self._pool.forget())
        self._files.check()  # then the rows taken in end with its words
        for row in (*self._scheduler.waiting, *self._scheduler.running):
            if row.handle.cancelled:
                self._outputs.cancel(row)
            elif why := late(row.submitted, row.limit_s, self._clock()):
                self._outputs.fail(row, "timeout", why)

    def _is_wanted(self, row: Row) -> bool:
        return not (row.handle.cancelled or late(row.submitted, row.limit_s, self._clock()))

    def _publish(self) -> None:
        """Updates what `state` gives of slots, which only the engine's thread may read."""
        leases = ((row.lease, row.request.id) for row in tuple(self._scheduler.running))
        requests = {lease.index: request for lease, request in leases if lease}
        self._slots = slot_states(self._pool.views(), requests)
        self._slot_bytes = self._pool.snapshot_bytes, self._pool.larger_bytes

    def _turn(self) -> bool:
        """A step, or, while the engine's failures last, only what needs no step. An engine without
        a thread does without the circuit: its owner sees each failure."""
        with self._lifecycle.fatal(after=self._publish):
            if not self._circuit.check():
                self._take_in()
                self._publish()
                return False
        return self.step()
