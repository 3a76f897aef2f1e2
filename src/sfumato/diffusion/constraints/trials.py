"""Grammars of clients are tried in another process, before this one compiles them; what has been
compiled or refused is kept, for requests that ask for the same one again.

A trial has a short turn first, so that what compiles in milliseconds passes what does not; what
takes longer runs on by itself and yields to the others.  Clients take turns in both.  Any thread
may call.  Each turn is a thread here, which waits, and a fork of `trial_process`, which compiles;
the socket between the two processes has the source and the answer, and to shut it ends the turn.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from socket import SHUT_RDWR, send_fds, socket, socketpair
from threading import Lock, Thread
from typing import Any, TypeVar

from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.grammar import (
    Grammar,
    GrammarSource,
    GrammarTokens,
    compiled_grammar,
    llguidance,
)
from sfumato.refused import Refused

log = logging.getLogger(__name__)

MOST_S = 1.0
"""Seconds of the processor's time for one grammar."""
FIRST_S = 0.05
"""Seconds of its first turn."""
MOST_WAITING = 64
"""Grammars that wait at a time."""
MOST_OF_ONE = 16
"""Grammars of one client among them."""
_MOST_STARTS = 2
"""How often a trial is begun whose process is ended from outside."""
_PROGRAM = "sfumato.diffusion.constraints.trial_process"

T = TypeVar("T")

SERVER_STACK = 16 << 20
"""Bytes, whatever the threads of the system have: a grammar that `depth` lets pass takes 2 MB."""
NICENESS = 5
"""By which compiling what clients send yields to the model's steps: it has a quarter of a core that
both want. More would starve it on a machine that is busy with other programs."""
_MORE_NICENESS = 2  # of what takes longer than its first turn
_starting = threading.Lock()


def on_a_stack_of(nbytes: int, work: Callable[[], T], niceness: int = 0) -> T:
    """Calls `work` in a thread that has such a stack, and waits for it. niceness: by
    which the thread yields to others, on Linux, where each has its own."""
    done = Future[T]()

    def run() -> None:
        if niceness and sys.platform == "linux":
            with suppress(OSError):  # as a sandbox may have it
                os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="sfumato-grammar", daemon=True)
    with _starting:  # the size is one for all threads that start
        before = threading.stack_size(nbytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()


TRIAL_STACK = 4 << 20
"""Bytes; a quarter of what the server compiles with, and twice what `depth` lets a grammar take."""
MEMORY = 256 << 20
"""Bytes of address space that one grammar may add."""
WAIT_S = 60.0
"""For one trial, on a machine too busy to give it its time."""
LONGEST_ANSWER = 32 << 20
"""Bytes; the rules of a grammar are some megabytes at most."""

DONE, TOO_LONG, TOO_LATE, DIED = range(4)
"""What came of a turn: an answer, or how its fork was ended."""
Request = tuple[float, int, bytes]
"""Asked of a fork: seconds of the processor's time, niceness, and a pickled source."""
Answer = tuple[int, bytes]


class TrialFailed(RuntimeError):
    """A grammar could not be tried, which is no fault of the grammar."""


@dataclass(frozen=True)
class Tried:
    """A grammar that compiles within the limits."""

    field: str
    text: str  # as llguidance takes it
    notes: tuple[str, ...]


@dataclass(eq=False)
class _Trial:
    """One source, and those who wait for it."""

    source: Source
    client: str
    since: int  # when it began to wait, or when its client had a turn last
    is_long: bool = False  # whether a first turn has been too short
    deaths: int = 0  # of the process, in its turns
    pipe: socket | None = None  # of its last turn
    waiting: list[Future[Tried]] = field(default_factory=list)

    def end_turn(self) -> None:
        """Ends its turn, if it has one."""
        if self.pipe is not None:
            with suppress(OSError):  # of a turn that is over
                self.pipe.shutdown(SHUT_RDWR)


class Trials:
    """Tries grammars over one vocabulary. The process starts with the first one."""

    def __init__(
        self,
        tokens: GrammarTokens,
        busy: Callable[[str], Exception],
        ended: Callable[[Source, Tried | Exception], None],
    ) -> None:
        """busy: makes the error where too many wait, or the machine is too busy; ended: called with
        what comes of each trial, before those who wait for it hear."""
        self._tokens, self._busy, self._ended = tokens, busy, ended
        self._open: dict[Source, _Trial] = {}
        self._running: dict[bool, _Trial] = {}  # by whether they are long
        self._clock = 0  # counts trials and turns
        self.process: TrialProcess | None = None  # the one that was started last
        self._lock, self._starting = Lock(), Lock()

    def start(self, source: Source, client: str = "") -> Future[Tried]:
        """Begins a trial, which ends early where all its futures are cancelled. client: takes turns
        with others. The future raises ValueError, naming the source's field, for what is refused or
        exceeds the limits; TrialFailed. Raises what `busy` makes where too many wait."""
        future = Future[Tried]()
        with self._lock:
            trial = self._open.get(source)
            if trial is None:
                self._check_room(client)
                self._clock += 1
                trial = self._open[source] = _Trial(source, client, self._clock)
            trial.waiting.append(future)
            self._dispatch()
        future.add_done_callback(lambda done: self._left(trial, done))
        return future

    def close(self, error: Exception) -> None:
        """Ends the process, and all trials with the error. A later trial starts another one."""
        with self._lock:
            process, self.process = self.process, None
            trials = [*self._open.values()]
            self._open.clear()
            for trial in self._running.values():
                trial.end_turn()
        if process is not None:
            process.leave()
            Thread(target=process.wait, name="sfumato-trials", daemon=True).start()
        for trial in trials:
            self._conclude(trial, error)

    def _check_room(self, client: str) -> None:
        waiting = Counter(trial.client for trial in self._waiting())
        if waiting.total() >= MOST_WAITING or waiting[client] >= MOST_OF_ONE:
            whose = "of yours" if waiting.total() < MOST_WAITING else "in all"
            most = MOST_OF_ONE if waiting.total() < MOST_WAITING else MOST_WAITING
            raise self._busy(
                f"{most} schemas and grammars {whose} wait to be compiled already, which is the "
                "limit; try again later"
            )

    def _waiting(self) -> list[_Trial]:
        running = self._running.values()
        return [trial for trial in self._open.values() if trial not in running]

    def _dispatch(self) -> None:
        """Gives turns to those that wait, of the clients that have waited longest. The lock is
        held."""
        for is_long in (False, True):
            waiting = [trial for trial in self._waiting() if trial.is_long == is_long]
            if is_long in self._running or not waiting:
                continue
            trial = self._running[is_long] = min(waiting, key=lambda each: each.since)
            self._clock += 1
            for other in waiting:
                if other.client == trial.client:
                    other.since = self._clock
            trial.pipe, theirs = socketpair()
            turn = trial, trial.pipe, theirs
            Thread(target=self._turn, args=turn, name="sfumato-trial", daemon=True).start()

    def _left(self, trial: _Trial, future: Future[Tried]) -> None:
        """Ends a trial for which no one waits any longer."""
        if not future.cancelled():
            return
        with self._lock:
            if future in trial.waiting:
                trial.waiting.remove(future)
            if trial.waiting or self._open.get(trial.source) is not trial:
                return
            del self._open[trial.source]
            trial.end_turn()

    def _turn(self, trial: _Trial, ours: socket, theirs: socket) -> None:
        """One turn of a trial, in a thread."""
        answer: Answer | None = None
        with ours:
            try:
                answer = self._exchanged(trial, ours, theirs)
            except Exception as error:  # also where the trial was ended meanwhile
                self._died(trial, error)
        with self._lock:
            del self._running[trial.is_long]
            is_open = self._open.get(trial.source) is trial  # else its client has left
            if answer is None:
                goes_on = trial.deaths < _MOST_STARTS
            else:
                goes_on = answer[0] == TOO_LONG and not trial.is_long
                trial.is_long = True
            if is_open and not goes_on:
                del self._open[trial.source]
            self._dispatch()
        if is_open and not goes_on:
            failed = TrialFailed("the process that tries grammars has ended twice")
            self._conclude(trial, self._outcome(trial.source, *answer) if answer else failed)

    def _exchanged(self, trial: _Trial, ours: socket, theirs: socket) -> Answer:
        """What comes of a turn. Raises where the process ends, or cannot be started."""
        with self._starting, theirs:
            if self.process is None or self.process.poll() is not None:
                self.process = TrialProcess()
                self.process.learn(self._tokens)
            send_fds(self.process.controls[trial.is_long], [b"."], [theirs.fileno()])
        seconds, niceness = (MOST_S, _MORE_NICENESS) if trial.is_long else (FIRST_S, 0)
        with ours.makefile("rwb") as stream:
            request: Request = seconds, niceness, pickle.dumps(trial.source)
            pickle.dump(request, stream)
            stream.flush()
            answer: Answer = pickle.load(stream)
        return answer

    def _died(self, trial: _Trial, error: Exception) -> None:
        """Counts a turn that had no answer, and ends what is left of the process, unless the trial
        was ended."""
        with self._lock:
            if self._open.get(trial.source) is not trial:
                return
            trial.deaths += 1
        log.warning("a process that tries grammars has ended; another one follows", exc_info=error)
        with self._starting:
            if self.process is not None:
                self.process.leave()
                self.process.kill()
                self.process.wait()

    def _outcome(self, source: Source, how: int, body: bytes) -> Tried | Exception:
        name = source.field if isinstance(source, GrammarSource) else "tools"
        if how == TOO_LONG:
            most = f"takes more than {MOST_S:g} s of the processor's time to compile"
            return Refused(name, f"{most}, which is the limit", "make it smaller")
        if how == TOO_LATE:
            return self._busy("the machine is too busy to compile grammars; try again later")
        if how == DONE:
            with suppress(ValueError, KeyError, TypeError):  # a damaged child wrote it
                answer = json.loads(body)
                if "why" in answer:
                    return Refused(tuple(answer["fields"]), answer["why"], answer["advice"])
                return Tried(answer["field"], answer["text"], tuple(answer["notes"]))
        why = "compiling it needs more memory than a grammar may have, or too deep a recursion"
        return Refused(name, why, "make it smaller")

    def _conclude(self, trial: _Trial, outcome: Tried | Exception) -> None:
        """Tells those who wait for a trial, which is open no more."""
        self._ended(trial.source, outcome)
        with self._lock:
            waiting = [*trial.waiting]
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Tried):
                future.set_result(outcome)
            else:
                future.set_exception(type(outcome)(*outcome.args))  # threads do not share one


class TrialProcess(subprocess.Popen[bytes]):
    """The process, which is one for first turns and a fork of it for those that run on. Each takes
    one turn at a time, behind a socket that it is sent."""

    def __init__(self) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("SFUMATO_")}
        # Address space that threads reserve would count against the limit of memory.
        own |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1"}
        ends = socketpair(), socketpair()
        self.controls = [ours for ours, _ in ends]
        fds = [theirs.fileno() for _, theirs in ends]
        super().__init__(
            [sys.executable, "-P", "-m", _PROGRAM, *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what a grammar makes llguidance say
            pass_fds=fds,
            process_group=0,  # a terminal's interrupt is for the server
            env=own,
        )
        for _, theirs in ends:
            theirs.close()

    def learn(self, tokens: GrammarTokens) -> None:
        """Writes the vocabulary, once."""
        assert self.stdin
        with self.stdin as stdin:
            pickle.dump((tokens.tokens, tokens.special_ids, tokens.end_ids), stdin)

    def leave(self) -> None:
        """Lets it end, when what it does is done."""
        for control in self.controls:
            control.close()


KEPT = 32
"""Grammars, and as many that were tried and are not compiled yet; some have megabytes."""
KEPT_REFUSALS = 256
"""Messages of sources that were refused."""


class GrammarCache:
    """Compiles for one vocabulary. Any thread may use it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self.trials: Trials | None = None  # of a cache that is guarded
        # By digests of sources: what came of each, the last asked for at the end.
        self._known: OrderedDict[bytes, Grammar | Tried | Refused] = OrderedDict()
        self._going: dict[bytes, Lock] = {}  # of sources that are compiled
        self._lock = Lock()

    def guard(self, busy: Callable[[str], Exception] = RuntimeError) -> None:
        """From now on every source is tried in another process before it is compiled in this one.
        busy: the error where too many wait for that. Without effect where processes cannot fork,
        as on Windows."""
        with self._lock:
            if self.trials is None and hasattr(os, "fork"):
                self.trials = Trials(self.tokens, busy, self._keep)

    def close(self, error: Exception) -> None:
        """Ends the process of trials, and those under way with the error."""
        if self.trials is not None:
            self.trials.close(error)

    def tried(self, source: Source, client: str = "") -> Future[Any]:
        """Begins to try a source, unless that is not needed; `grammar` then only compiles it.
        Cancelling the future ends the trial. Raises, as the future does, what `Trials.start`
        raises."""
        llguidance()
        with self._lock:
            known = self._known.get(_digest(source))
        if self.trials is not None and self.tokens.end_ids and known is None:
            return self.trials.start(source, client)
        done = Future[None]()
        if isinstance(known, Refused):
            done.set_exception(copy(known))
        else:
            done.set_result(None)
        return done

    def grammar(self, source: Source) -> Grammar:
        """The compiled grammar of a source, which one thread at a time compiles; the others wait
        for it. Raises ValueError as a source's `compile` does, and what a trial raises."""
        digest = _digest(source)
        with self._lock:
            going = self._going.setdefault(digest, Lock())
        try:
            with going:
                known = self._remembered(digest)
                if not isinstance(known, Grammar | Refused):
                    try:
                        known = self._compiled(source, known)
                    except Refused as error:
                        known = error
                    self._keep(source, known)
        finally:
            with self._lock:
                self._going.pop(digest, None)
        if isinstance(known, Refused):
            raise copy(known)  # threads do not share one
        return known

    def _remembered(self, digest: bytes) -> Grammar | Tried | Refused | None:
        """What is known of a source, which is then kept longer than others."""
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._known.get(digest)

    def _compiled(self, source: Source, tried: Tried | None) -> Grammar:
        if self.trials is None or not self.tokens.end_ids:
            return on_a_stack_of(SERVER_STACK, lambda: source.compile(self.tokens))
        made = tried or self.trials.start(source).result()
        work = partial(compiled_grammar, made.text, made.field, self.tokens)
        grammar = on_a_stack_of(SERVER_STACK, work, NICENESS)
        return replace(grammar, notes=made.notes)

    def _keep(self, source: Source, known: Grammar | Tried | Exception) -> None:
        """Nothing of a failure that is no refusal."""
        if not isinstance(known, Grammar | Tried | Refused):
            return
        digest = _digest(source)
        with self._lock:
            self._known[digest] = copy(known) if isinstance(known, Refused) else known
            self._known.move_to_end(digest)
            alike = [key for key, each in self._known.items() if type(each) is type(known)]
            if len(alike) > (KEPT_REFUSALS if isinstance(known, Refused) else KEPT):
                del self._known[alike[0]]


def _digest(source: Source) -> bytes:
    """Tells sources apart by all their fields: those that are refused, which may be long, need not
    be kept."""
    return sha256(repr(source).encode("utf-8", "surrogatepass")).digest()
