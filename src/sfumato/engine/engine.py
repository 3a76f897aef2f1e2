"""The engine: many requests, one model. `step()` is schedule, run, process outputs.

What clients call may be called from any thread; `AnyEngine` has what needs no network of its own.
`Inbox` and `Lifecycle` are the engine's thread, its end, and what then becomes of its requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import Condition, Thread
from typing import Any, TypeVar

from sfumato.api import Model, Reply
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine.any_engine import JOIN_S, AnyEngine
from sfumato.engine.circuit import Circuit, FileCheck, probe
from sfumato.engine.engine_config import READ_TOKENS, EngineConfig
from sfumato.engine.errors import EngineDead, EngineError, NotReady, QueueFull, Stops
from sfumato.engine.events import Completed, FailureKind, Handle, Sink, Terminal, late
from sfumato.engine.memory.device_memory import used_memory
from sfumato.engine.memory.guard import MemoryGuard
from sfumato.engine.output_processor import OnFinish, OutputProcessor
from sfumato.engine.prepare import Job, check_timeout
from sfumato.engine.queue.scheduler import Scheduler
from sfumato.engine.queue.slots import make_pool
from sfumato.engine.request import AnyRequest, Request
from sfumato.engine.row import Row
from sfumato.engine.runner import Runner
from sfumato.engine.stats import EngineState, Health, Statistics
from sfumato.model.adapters import Adapter
from sfumato.model.named_adapters import NamedAdapter, check_name, nbytes_of
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.works import Task

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.05  # how often a queue that nothing moves is looked at again
IDLE_S = 1.0  # how often an engine without requests iterates, for what it checks by itself
CLOSING = "the server is shutting down"

Call = tuple[Callable[[], Any], Future[Any]]
"""A call that the engine's thread makes between two steps, and the future of its result."""


class Inbox:
    """Any thread may put; the engine's thread takes."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._rows: list[Row] = []  # submitted, not yet seen by the engine's thread
        self._calls: list[Call] = []
        self.closed: str | None = None  # why nothing is taken any more
        self.stopped = False  # whether the engine's thread is to end

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows that were submitted and not taken yet."""
        return tuple(self._rows)

    def put(self, row: Row, has_room: Callable[[], bool], limit: int) -> None:
        """Submits a row. has_room: whether the queue takes one more; limit: rows that may wait, for
        the message. Raises EngineDead and QueueFull."""
        with self._changed:
            if self.closed is not None:
                raise EngineDead(self.closed)
            if not has_room():
                raise QueueFull(
                    f"{limit} requests wait already, which is the limit; try again later, or raise "
                    "--queue"
                )
            self._rows.append(row)
            self._changed.notify_all()

    def put_call(self, work: Callable[[], T]) -> Future[T]:
        """Asks for something that is done between two steps. Raises EngineDead."""
        done: Future[T] = Future()
        with self._changed:
            if self.closed is not None:
                raise EngineDead(self.closed)
            self._calls.append((work, done))
            self._changed.notify_all()
        return done

    def take(self, queue: deque[Row]) -> list[Call]:
        """Moves the rows into a queue, so that each is always in one of both; returns the calls
        that are requested and not cancelled."""
        with self._changed:
            queue.extend(self._rows)
            self._rows.clear()
            calls, self._calls = self._calls, []
        return [call for call in calls if call[1].set_running_or_notify_cancel()]

    def close(self, reason: str, stop: bool = False, overrule: bool = False) -> None:
        """Takes nothing any more. The first reason counts, unless one is to overrule it; stop: the
        engine's thread ends."""
        with self._changed:
            self.closed = reason if overrule else self.closed or reason
            self.stopped = self.stopped or stop
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout_s: float | None, although_rows: bool = False) -> None:
        """Returns when something was put or `wake` was called, or after timeout_s. although_rows:
        rows that are there already do not count."""
        with self._changed:
            if not (self.stopped or self._calls) and (although_rows or not self._rows):
                self._changed.wait(timeout_s)


class Lifecycle:
    """Starts an engine's thread, and ends engine and thread, once."""

    def __init__(self, inbox: Inbox, scheduler: Scheduler, outputs: OutputProcessor) -> None:
        self._inbox, self._scheduler, self._outputs = inbox, scheduler, outputs
        self._death: str | None = None
        self.thread: Thread | None = None

    @property
    def death(self) -> str | None:
        """Why the engine has stopped though it was not closed; None where it has not."""
        if self._death is None and not self._inbox.closed and self.thread is not None:
            return None if self.thread.is_alive() else "the engine's thread has ended"
        return self._death

    def start(self, iterate: Callable[[], bool], is_held: Callable[[], bool]) -> None:
        """Calls `iterate` in a thread until the end; iterate: False where there was nothing to do;
        is_held: whether submitted rows have to wait."""
        assert self.thread is None, "an engine is started once"
        self.thread = Thread(
            target=self._serve, args=(iterate, is_held), name="sfumato-engine", daemon=True
        )
        self.thread.start()

    def drain(self, seconds: float, step: Callable[[], object]) -> None:
        """Takes no more requests, and waits so long for those accepted."""
        self._inbox.close("the engine is shutting down")
        until = time.monotonic() + seconds
        while self._is_busy() and not self._death and time.monotonic() < until:
            if self.thread is None:
                step()
            else:
                time.sleep(min(POLL_S, seconds))

    def stop(self, join_s: float) -> bool:
        """Ends the thread, and fails the requests that have not ended. False where a step goes on
        for longer than join_s, and is left to itself."""
        self._inbox.close(CLOSING, stop=True)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(join_s)
            if self.thread.is_alive():
                self._fail_all("shutdown", CLOSING, self._outputs.abandon)
                return False
        self._fail_all("shutdown", CLOSING, self._outputs.fail)
        return True

    @contextmanager
    def fatal(self, after: Callable[[], None]) -> Iterator[None]:
        """What is raised within ends the engine; then `after` is called."""
        try:
            yield
        except BaseException as error:
            self._die(error)
            after()
            raise

    def _serve(self, iterate: Callable[[], bool], is_held: Callable[[], bool]) -> None:
        while not self._inbox.stopped:
            try:
                is_busy = iterate()
            except BaseException:
                return  # all requests have been ended
            if not is_busy:
                held = is_held()
                # What nothing moves still has deadlines, cancellations and probes.
                poll_s = POLL_S if self._scheduler.waiting or held else IDLE_S
                self._inbox.wait(poll_s, although_rows=held)

    def _is_busy(self) -> bool:
        return bool(self._inbox.rows or self._scheduler.waiting or self._scheduler.running)

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt | SystemExit):  # by which the owner ends it
            log.critical("the engine has stopped", exc_info=error)
        known = isinstance(error, Stops)
        why = f": {error}" if known else f" after an internal error ({type(error).__name__})"
        self._death = f"the engine has stopped{why}"
        self._inbox.close(self._death, stop=True, overrule=True)
        self._fail_all("internal", self._death, self._outputs.fail)

    def _fail_all(
        self, kind: FailureKind, message: str, fail: Callable[[Row, FailureKind, str], None]
    ) -> None:
        submitted: deque[Row] = deque()
        for _, done in self._inbox.take(submitted):
            done.set_exception(EngineDead(message))
        for row in (*self._scheduler.running, *self._scheduler.waiting, *submitted):
            try:
                fail(row, kind, message)
            except Exception:  # the client has its event all the same
                log.exception("request %s could not be removed", row.request.id)


def own_engine(model: Model, layout: EngineConfig, advice: str) -> Engine:
    """An engine whose user is at hand and can end a request: it sets no time limit, and allows as
    many steps as the library does. Raises EngineError, with this advice, where the memory does not
    suffice."""
    try:
        return Engine(model, replace(layout, max_steps=MOST_STEPS, request_timeout_s=None))
    except EngineError as error:
        raise error.advising(advice) from error


class Engine(AnyEngine):
    """Serves requests with one model, whose network no other code may use meanwhile.

    Either `start()` gives it a thread, or its owner calls `step()`. Any thread may submit. `with
    Engine(model) as engine:` starts it, and closes it once it has served what was submitted.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        on_finish: OnFinish | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_finish: called once for each request, with its terminal event in the engine's thread,
        before the client hears of it, or, where it is refused, with a `Failed` that has no account
        in the caller's.

        Raises EngineError where the slots do not fit the memory."""
        config, self._began = config or EngineConfig(), clock()
        self._guard = MemoryGuard(model.network, config)
        self._pool = make_pool(model.network, config, self._guard)
        super().__init__(model, config, self._pool.longest, clock)
        self._statistics, self._inbox = Statistics(clock), Inbox()
        own_chunk, on_cpu = self.config.prefill_chunk, model.network.device.type == "cpu"
        most_read = READ_TOKENS if on_cpu or own_chunk is None else own_chunk
        chunk = self.config.chunk_on(model.network.device)
        self._scheduler = Scheduler(self._pool, chunk, clock, most_read)
        self._runner = Runner(model.network, self.config.slots, most_read, clock)
        self._circuit = Circuit(lambda: probe(model), clock)
        self._outputs = OutputProcessor(
            self._scheduler, self._statistics, self._circuit, on_finish, clock
        )
        self._files = FileCheck(model.network.files, clock)
        self._lifecycle = Lifecycle(self._inbox, self._scheduler, self._outputs)
        self._publish()

    # For clients: any thread may call.

    def check(self, request: Request) -> None:
        with self.refusals(request):
            self.model.adapters.number(request.adapter)
            self._check_room(self._job(request))

    def run(
        self, task: Task, request: AnyRequest | None = None, sink: Sink | None = None
    ) -> Handle[Any]:
        """Queues a task of any kind, which ends in `Completed` or `Failed`; its other events go to
        the sink as they are. Raises what `submit` raises."""
        request = request or AnyRequest()
        with self.refusals(request):
            check_timeout(request.timeout_s)
            return self._put(request, lambda: Job(task, Completed, wants_drafts=True), sink)

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
        running = len(self._scheduler.running)
        uptime_s = self._clock() - self._began
        return Health(reason is None, reason, uptime_s, self._waiting(), running)

    def state(self) -> EngineState:
        now = self._clock()
        return EngineState(
            self._waiting(),
            tuple(row.state(now) for row in tuple(self._scheduler.running)),
            self._slots,
            self._statistics.copy(),
            self._statistics.speeds(),
            self._statistics.history(),
            *self._slot_bytes,
            self._guard.view,
            self._circuit.reason is not None,
        )

    def used_memory(self) -> int | None:
        return used_memory(self.model.network.device)

    def reset_prefix_cache(self) -> Future[int]:
        return self._inbox.put_call(self._pool.forget)

    @property
    def adapters(self) -> Mapping[str, NamedAdapter]:
        return self.model.adapters.named

    def load_adapter(
        self, name: str, adapter: str | PathLike[str] | Adapter
    ) -> Future[NamedAdapter]:
        check_name(name)
        if isinstance(adapter, str | PathLike):
            changes, source = self.model.read_adapter(adapter), str(adapter)
        else:
            changes, source = adapter, ""
        return self._inbox.put_call(partial(self._attached, name, changes, source))

    def _attached(self, name: str, adapter: Adapter, source: str) -> NamedAdapter:
        nbytes = nbytes_of(adapter)
        self._guard.take(nbytes, f"the adapter {name!r}")
        try:
            return self.model.adapters.attach(name, adapter, source)
        except BaseException:
            self._guard.give_back(nbytes)
            raise

    def unload_adapter(self, name: str) -> Future[NamedAdapter]:
        return self._inbox.put_call(partial(self.model.adapters.take_off, name))

    def pulse(self) -> Future[None]:
        """Done between two steps: a health check sees by it whether steps go on. Raises
        EngineDead."""
        return self._inbox.put_call(lambda: None)

    # How requests are taken.

    def _report(self, request: AnyRequest, terminal: Terminal) -> None:
        self._outputs.report(request, terminal)

    def _put(
        self, request: AnyRequest, make: Callable[[], Job], sink: Callable[[Any], None] | None
    ) -> Handle[Any]:
        if self._inbox.closed is None and self._circuit.reason is not None:
            raise NotReady(self._circuit.reason, self._circuit.retry_s())
        # Before the prompt is made: the time for that is the client's waiting time too.
        since = self._clock() if request.since is None else request.since
        adapter = self.model.adapters.number(request.adapter)
        job = make()
        self._check_room(job)
        handle: Handle[Any] = Handle(request.id, sink, self._inbox.wake)
        mask = self.model.network.image_mask
        row = Row(request, job, handle, since, self._limit_s(request), mask, adapter)
        self._inbox.put(row, partial(self._has_room, request.background), self.config.queue)
        return handle

    def _check_room(self, job: Job) -> None:
        """Raises TooLarge where no slot can ever hold what a task claims, or its questions: a long
        one takes as much as a larger slot of its length; and Refused for pictures that the
        model cannot see."""
        claim = job.task.claim
        if claim.prompt.pictures:
            _ = self.model.cut
        try:
            self._pool.check(claim.positions)
        except TooLarge as error:
            error.prompt_tokens = len(claim.prompt.ids)
            raise
        longest = claim.beside
        if longest > PIECE and (lack := self._guard.lacks([longest], None)) is not None:
            raise TooLarge(
                "questions",
                f"the longest has {longest:,} tokens, and what is kept of them {lack}",
                "shorten it, or lower --slots or --context",
            )

    def _waiting(self, background: bool = True) -> int:
        """Requests in the queue; background: those in the background too."""
        rows = (*self._inbox.rows, *self._scheduler.waiting)
        return sum(background or not row.request.background for row in rows)

    def _has_room(self, background: bool) -> bool:
        # Those for whom a slot is free do not wait; the next step takes them. Those in the
        # background take no room that others need.
        free = max(0, self.config.slots - len(self._scheduler.running))
        return self._waiting(background) < self.config.queue + free

    # For the owner.

    def warm_up(self) -> None:
        """On a GPU, compiles the kernels of usual steps, for which else the first requests wait:
        up to minutes where nothing was compiled before. Before `start`, without requests."""
        config = SamplerConfig(canvas_length=self.model.config.canvas_length)
        with self._lifecycle.fatal(after=self._publish):
            self._runner.warm_up(self._pool.empty_slots, config.over(self.model.sampler_defaults))

    def start(self) -> Engine:
        """Gives the engine its thread."""
        self._lifecycle.start(self._iterate, lambda: self._circuit.reason is not None)
        return self

    def __enter__(self) -> Engine:
        return self if self._lifecycle.thread else self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain_s=0.0 if kind else math.inf)

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
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
            seeing = schedule.see()
            outputs.process(runner.see(seeing))
            pieces = schedule.encode()
            encoded = runner.encode(pieces)
            outputs.process(encoded)
            canvases = schedule.denoise(self._is_wanted)
            outputs.process(runner.denoise(canvases, encoded.commits))
            rows = schedule.draw(self._is_wanted)
            outputs.process(runner.draw(rows))
            share = schedule.score(self._is_wanted, sum(c.length for _, c in canvases))
            outputs.process(runner.score(share))
            self._publish()
            runner.between_steps()
            works = seeing, pieces, canvases, rows, share.rows
            return any(map(bool, works)) or runner.is_ahead

    def _admit(self) -> None:
        """Takes in what was submitted, and begins the tasks for which there is a slot."""
        self._take_in()
        for row, error in self._scheduler.admit():
            if error is None:
                self._outputs.begun(row)
            else:
                self._outputs.end_with(row, error)

    def _take_in(self) -> None:
        """Takes in what was submitted, does what was asked for, and ends what has been cancelled or
        is late. Raises Stops."""
        for work, done in self._inbox.take(self._scheduler.waiting):
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        self._files.check()  # then the rows taken in end with its words
        adapters = self.model.adapters
        for row in (*self._scheduler.waiting, *self._scheduler.running):
            if row.handle.cancelled:
                self._outputs.cancel(row)
            elif not adapters.has(row.adapter):  # it was unloaded since the name was looked up
                self._outputs.end_with(row, Refused("adapter", "was unloaded", "name another"))
            elif why := late(row.submitted, row.limit_s, self._clock()):
                self._outputs.fail(row, "timeout", why)

        if adapters.leaving:
            self._free_adapters()

    def _free_adapters(self) -> None:
        """Frees the adapters without a name that no row uses any more, and their prefixes."""
        rows = (*self._scheduler.waiting, *self._scheduler.running)
        for number in set(self.model.adapters.leaving) - {row.adapter for row in rows}:
            self._pool.forget(number)
            self._guard.give_back(self.model.adapters.detach(number).nbytes)

    def _is_wanted(self, row: Row) -> bool:
        return not (row.handle.cancelled or late(row.submitted, row.limit_s, self._clock()))

    def _publish(self) -> None:
        """Updates what `state` gives of slots, which only the engine's thread may read."""
        leases = ((row.lease, row.request.id) for row in tuple(self._scheduler.running))
        requests = {lease.index: request for lease, request in leases if lease}
        self._slots = self._pool.states(requests)
        self._slot_bytes = self._pool.snapshot_bytes, self._pool.larger_bytes

    def _iterate(self) -> bool:
        """A step, or, while the engine's failures last, only what needs no step. An engine without
        a thread does without the circuit: its owner sees each failure."""
        with self._lifecycle.fatal(after=self._publish):
            if not self._circuit.check():
                self._take_in()
                self._publish()
                return False
        return self.step()
