"""The engine: many requests, one model. `step()` is schedule, run, settle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition, Thread

from sfumato.api import Model, Reply
from sfumato.diffusion.limits import TooLarge
from sfumato.engine.circuit import Circuit, probe
from sfumato.engine.client import ServedModel
from sfumato.engine.config import EngineConfig
from sfumato.engine.device_memory import used_memory
from sfumato.engine.errors import REFUSALS, EngineDead, FailuresLast, NotReady, QueueFull
from sfumato.engine.events import Failed, FailureKind
from sfumato.engine.failures import explain, late
from sfumato.engine.handle import Handle, Sink
from sfumato.engine.memory_guard import MemoryGuard
from sfumato.engine.output_processor import OnFinish, OutputProcessor
from sfumato.engine.request import (
    Prepared,
    Prompt,
    Request,
    check_length,
    make_prompt,
    prepare,
    seams_of,
)
from sfumato.engine.row import Row
from sfumato.engine.runner import Runner
from sfumato.engine.scheduler import Plan, Scheduler
from sfumato.engine.sharing import Sharing
from sfumato.engine.slots import make_pool
from sfumato.engine.stats import EngineState, Health, SlotState, Statistics

log = logging.getLogger(__name__)

POLL_S = 0.05  # how often a line that nothing moves is looked at again
JOIN_S = 30.0  # how long a step under way may hold up `close`
CLOSING = "the server is shutting down"


class Engine:
    """Serves requests with one model, whose network nobody else may use meanwhile.

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
        self._clock = clock
        c = self.config
        self._guard = MemoryGuard(model.network, c)
        self._pool = make_pool(model.network, c, self._guard)
        self._scheduler, self._statistics = Scheduler(c.prefill_chunk), Statistics(clock)
        self._sharing = Sharing(self._pool)
        self._runner = Runner(model.network, self._pool, clock)
        self._circuit = Circuit(lambda: probe(model), clock)
        self._outputs = OutputProcessor(
            self._scheduler, self._pool, self._statistics, self._circuit, on_finish, clock
        )
        self._began, self._longest = clock(), self._pool.longest
        self._seams = seams_of(model)
        self._inbox: list[Row] = []  # submitted, not yet seen by the engine's thread
        self._resets: list[Future[int]] = []  # of the prefix cache, asked for and not yet done
        self._wake = Condition()
        self._thread: Thread | None = None
        self._closed: str | None = None  # why no request is taken any more
        self._death: str | None = None
        self._stop = False
        self._publish()

    # For clients: any thread.

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        """Puts a request in line. sink: called with its events in the engine's thread, and must
        not block.

        Raises ValueError, naming the field, for what cannot be done; TooLarge, a ValueError, for
        what no slot can ever hold; QueueFull; NotReady; EngineDead.
        """
        with self.refusals(request):
            return self._submit(request, sink)

    def offer(self, request: Request, sink: Sink | None = None) -> Handle | None:
        """As `submit`, but where the queue is full it returns None, and on_finish is not called."""
        with self.refusals(request):
            try:
                return self._submit(request, sink)
            except QueueFull:
                return None

    def check(self, request: Request) -> None:
        """Raises what `submit` raises of a request that cannot be done."""
        with self.refusals(request):
            self._prepared(request)

    def drop(self, request: Request, terminal: Failed) -> None:
        """Tells on_finish how a request ended that was to be submitted later."""
        self._outputs.tell(request, terminal)

    def late(self, request: Request) -> str | None:
        """Why a request that is to be submitted later ends now; None before its deadline."""
        return late(request.since, self._limit(request), self.now())

    def _limit(self, request: Request) -> float | None:
        limits = (request.timeout_s, self.config.request_timeout_s)
        return min((s for s in limits if s is not None), default=None)

    def _prepared(self, request: Request) -> Prepared:
        most = self.config.max_steps
        prepared = prepare(self.model, request, self._longest, self._seams, most)
        try:
            self._pool.check(prepared.need)
        except TooLarge as error:
            error.prompt_tokens = len(prepared.prompt.ids)
            raise
        return prepared

    def _submit(self, request: Request, sink: Sink | None) -> Handle:
        if self._closed is None and self._circuit.reason is not None:
            raise NotReady(self._circuit.reason, self._circuit.retry_s())
        # Before the prompt is made: the time for that is the client's waiting time too.
        since = self.now() if request.since is None else request.since
        prepared, handle = self._prepared(request), Handle(request.id, sink, self._notify)
        row = Row(request, prepared, handle, since, self._limit(request))
        with self._wake:
            if self._closed is not None:
                raise EngineDead(self._closed)
            # Those for whom a slot is free do not wait; the next step takes them.
            free = max(0, self.config.slots - len(self._scheduler.running))
            if self._waiting() >= self.config.queue + free:
                raise QueueFull(
                    f"{self.config.queue} requests wait already, which is the limit; try again "
                    "later, or raise --queue"
                )
            self._inbox.append(row)
            self._wake.notify_all()
        return handle

    def now(self) -> float:
        """The engine's clock, for `Request.since`, in seconds from some moment on."""
        return self._clock()

    def prompt(self, request: Request) -> Prompt:
        """What the request's prompt comes to: for a caller who needs its length, or submits it
        several times, and then sets `made`. Raises ValueError and TooLarge, as `submit` does."""
        with self.refusals(request):
            return make_prompt(self.model, request, self._longest, self._seams)

    def check_length(self, text: str, field: str) -> None:
        """Raises TooLarge, naming the field, for a text that no context here could hold. It is not
        tokenized for that."""
        check_length(self.model, text, self._longest, field)

    @contextmanager
    def refusals(self, request: Request) -> Iterator[None]:
        """Tells on_finish where the request is refused inside."""
        try:
            yield
        except REFUSALS as error:
            kind, message = explain(error)
            dead = isinstance(error, EngineDead) and self._death is not None
            self._outputs.tell(request, Failed("internal" if dead else kind, message))
            raise

    def generate(self, request: Request) -> Reply:
        """The reply to a request. Raises what `submit` raises, and RequestFailed."""
        handle = self.submit(request)
        while self._thread is None and handle.terminal is None:
            self.step()
        return handle.result()

    @property
    def death(self) -> str | None:
        """Why the engine has stopped though it was not closed; None where it has not."""
        if self._death is None and not (self._stop or self._closed) and self._thread is not None:
            return None if self._thread.is_alive() else "the engine's thread has ended"
        return self._death

    def health(self) -> Health:
        reason = self.death or self._closed or self._circuit.reason
        return Health(
            reason is None,
            reason,
            self._clock() - self._began,
            self._waiting(),
            len(self._scheduler.running),
        )

    def state(self) -> EngineState:
        """What runs and what has been done, as of about now."""
        now = self._clock()
        return EngineState(
            self._waiting(),
            tuple(row.state(now) for row in self._running()),
            self._slots,
            self._statistics.copy(),
            self._statistics.speeds(),
            self._statistics.history(),
            *self._slot_bytes,
            self._guard.view,
            self._circuit.state,
        )

    def used_memory(self) -> int | None:
        """Bytes that this process holds on the model's device; None where unknown."""
        return used_memory(self.model.network.device)

    def reset_prefix_cache(self) -> Future[int]:
        """Has the engine forget, before its next step, what free slots hold: how many held
        something. Raises EngineDead."""
        done: Future[int] = Future()
        with self._wake:
            if self._closed is not None:
                raise EngineDead(self._closed)
            self._resets.append(done)
            self._wake.notify_all()
        return done

    # For the owner.

    def start(self) -> Engine:
        """Gives the engine its thread."""
        assert self._thread is None, "an engine is started once"
        self._thread = Thread(target=self._serve, name="sfumato-engine", daemon=True)
        self._thread.start()
        return self

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
        """Takes no more requests, waits up to drain_s for those accepted, and fails the rest.

        join_s: how long a step under way may hold this up. Past it everybody is told all the same,
        and the step is left to itself.
        """
        with self._wake:
            self._closed = self._closed or "the engine is shutting down"
        until = time.monotonic() + drain_s
        while (self._waiting() or self._running()) and not self._death and time.monotonic() < until:
            if self._thread is None:
                self.step()
            else:
                time.sleep(min(POLL_S, drain_s))
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(join_s)
            if self._thread.is_alive():
                self._fail_all("shutdown", CLOSING, self._outputs.abandon)
                return
        self._fail_all("shutdown", CLOSING)
        self._publish()

    def step(self) -> bool:
        """One step of all rows; False where there is nothing to do. Not after `start`."""
        with self._deadly():
            plan = self._schedule()
            busy = bool(plan.encode or plan.denoise)
            if busy:
                self._outputs.process(self._runner.run(plan, self._wanted))
            self._publish()
            return busy

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """What is raised inside ends the engine."""
        try:
            yield
        except BaseException as error:
            self._die(error)
            raise

    def _publish(self) -> None:
        """What `state` tells of slots, which only the engine's thread may look into."""
        pool = self._pool
        leases = ((row.lease, row.request.id) for row in self._running())
        holders = {lease.index: owner for lease, owner in leases if lease}
        self._slots = tuple(
            SlotState(v.index, v.context, v.busy, v.tokens, v.larger, holders.get(v.index))
            for v in pool.views()
        )
        self._slot_bytes = pool.snapshot_bytes, pool.larger_bytes

    def _schedule(self) -> Plan:
        self._take_in()
        self._admit()
        return self._scheduler.plan()

    def _take_in(self) -> None:
        """Takes in what was submitted, and ends what has been cancelled or is late."""
        with self._wake:
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            resets, self._resets = self._resets, []
        for reset in resets:
            if reset.set_running_or_notify_cancel():
                reset.set_result(self._pool.forget())
        for row in (*self._scheduler.waiting, *self._scheduler.running):
            if not self._wanted(row):
                self._give_up(row)

    def _wanted(self, row: Row) -> bool:
        return not (row.handle.cancelled or late(row.submitted, row.limit_s, self._clock()))

    def _give_up(self, row: Row) -> None:
        if row.handle.cancelled:
            self._outputs.finish(row, "cancelled")
        elif why := late(row.submitted, row.limit_s, self._clock()):
            self._outputs.fail(row, "timeout", why)

    def _admit(self) -> None:
        """Gives slots to those in line, strictly in order, as long as there are any. Who waits
        for what another row encodes needs none yet."""
        for row in tuple(self._scheduler.waiting):
            if self._sharing.waits(row, self._scheduler.running):
                continue
            if row.first_in_line is None:
                row.first_in_line = self._clock()
            try:
                if not self._outputs.lend(row):
                    return
            except Exception as error:
                self._outputs.end_with(row, error)
            else:
                self._scheduler.admit(row)

    # The thread, and the end.

    def _serve(self) -> None:
        while not self._stop:
            try:
                busy = self._turn()
            except BaseException:
                return  # all requests have been ended
            if not busy:
                with self._wake:
                    held = self._circuit.reason is not None
                    if not (self._stop or self._resets) and (held or not self._inbox):
                        # What nothing moves still has deadlines, cancellations and probes.
                        self._wake.wait(POLL_S if self._scheduler.waiting or held else None)

    def _turn(self) -> bool:
        """A step, or, while the engine's failures last, only what needs no step. An engine without
        a thread does without the circuit: its owner sees each failure."""
        with self._deadly():
            if not self._circuit.check():
                self._take_in()
                self._publish()
                return False
        return self.step()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _running(self) -> tuple[Row, ...]:
        return tuple(self._scheduler.running)

    def _waiting(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting)

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt | SystemExit):  # which the owner asked for
            log.critical("the engine has stopped", exc_info=error)
        with self._wake:
            why = str(error) if isinstance(error, FailuresLast) else type(error).__name__
            self._death = f"the engine has stopped after an internal error ({why})"
            self._closed, self._stop = self._death, True
        self._fail_all("internal", self._death)
        self._publish()

    def _fail_all(
        self,
        kind: FailureKind,
        message: str,
        fail: Callable[[Row, FailureKind, str], None] | None = None,
    ) -> None:
        fail = fail or self._outputs.fail
        with self._wake:
            rows = [*self._scheduler.running, *self._scheduler.waiting, *self._inbox]
            self._inbox.clear()
            resets, self._resets = self._resets, []
        for reset in resets:
            if reset.set_running_or_notify_cancel():
                reset.set_exception(EngineDead(message))
        for row in rows:
            try:
                fail(row, kind, message)
            except Exception:  # the client has its event all the same
                log.exception("request %s could not be cleared away", row.request.id)
