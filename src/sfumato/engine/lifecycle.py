"""The life of an engine: its thread, its end, and what then becomes of its requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition, Thread

from sfumato.engine.errors import EngineDead, QueueFull, Stops
from sfumato.engine.events import FailureKind
from sfumato.engine.output_processor import OutputProcessor
from sfumato.engine.queue.scheduler import Scheduler
from sfumato.engine.row import Row

Resets = list[Future[int]]


class Inbox:
    """Any thread may put; the engine's thread takes."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._rows: list[Row] = []  # submitted, not yet seen by the engine's thread
        self._resets: Resets = []
        self.closed: str | None = None  # why nothing is taken any more
        self.stopped = False  # whether the engine's thread is to end

    def __len__(self) -> int:
        """Rows that were submitted and not taken yet."""
        return len(self._rows)

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

    def put_reset(self) -> Future[int]:
        """Asks for a reset of the prefix cache. Raises EngineDead."""
        done: Future[int] = Future()
        with self._changed:
            if self.closed is not None:
                raise EngineDead(self.closed)
            self._resets.append(done)
            self._changed.notify_all()
        return done

    def take(self, queue: deque[Row]) -> Resets:
        """Moves the rows into a queue, so that each is always in one of both; returns the resets
        that are requested and not cancelled."""
        with self._changed:
            queue.extend(self._rows)
            self._rows.clear()
            resets, self._resets = self._resets, []
        return [reset for reset in resets if reset.set_running_or_notify_cancel()]

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
            if not (self.stopped or self._resets) and (although_rows or not self._rows):
                self._changed.wait(timeout_s)


log = logging.getLogger(__name__)

POLL_S = 0.05  # how often a queue that nothing moves is looked at again
IDLE_S = 1.0  # how often an engine without requests iterates, for what it checks by itself
CLOSING = "the server is shutting down"


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
        return bool(len(self._inbox) or self._scheduler.waiting or self._scheduler.running)

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
        for reset in self._inbox.take(submitted):
            reset.set_exception(EngineDead(message))
        for row in (*self._scheduler.running, *self._scheduler.waiting, *submitted):
            try:
                fail(row, kind, message)
            except Exception:  # the client has its event all the same
                log.exception("request %s could not be removed", row.request.id)
