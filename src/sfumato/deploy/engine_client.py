"""`EngineClient`: an engine whose replicas are in other processes, for the server that is in front.

It has tokenizer and templates, and no weights. What a request lacks is refused here; what is left
runs on one replica, whose events come back. A replica may be lost at any time: a request of which
no client has seen anything runs again on another one, with the seed that was drawn here, and so
gives the same text. Knows no Ray: what reaches replicas is given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from sfumato.api import Model, Settled
from sfumato.diffusion.canvas import Draft
from sfumato.engine.any_engine import JOIN_S, AnyEngine
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineDead, NotReady, QueueFull
from sfumato.engine.events import Failed, Handle, Terminal, explain
from sfumato.engine.prepare import Job
from sfumato.engine.queue.slots import SlotState
from sfumato.engine.request import AnyRequest, DecisionRequest, Request, without_pixels
from sfumato.engine.stats import EngineState, Health, History, RowState, Speeds, Totals
from sfumato.model.named_adapters import NamedAdapter
from sfumato.refused import Refused
from sfumato.server.gateways import HEADERS

log = logging.getLogger(__name__)
Figures = TypeVar("Figures", Totals, Speeds)

RUNS = 3  # replicas at most that get one request: it may be what ends them
AGAIN_S = 0.5  # until a request runs again; then twice as long
REPORT_S = 2.0  # how often replicas report
ABSENT_S = 300.0  # without any replica, after which those who wait for one get an error
CANCEL_S = 10.0  # that a replica may take to end a request that was cancelled
GRACE_S = 30.0  # beyond its time limit, after which a request ends although no replica has said so
_SESSIONS = tuple(name for name in HEADERS if "session" in name)
_KEY = 4096  # characters, or tokens, of a prompt that decide which session it is of


class ReplicaLost(RuntimeError):
    """The replica that had a request is gone, or takes no more."""


@dataclass(frozen=True)
class Facts:
    """What a front has to know of its replicas' engines, which are alike."""

    config: EngineConfig
    longest: int  # positions that a slot can have at most
    device: str
    adapters: Mapping[str, NamedAdapter]


@dataclass(frozen=True)
class Report:
    """How one replica is doing."""

    health: Health
    state: EngineState
    used_memory: int | None


class Replicas(Protocol):
    """Engines in other processes. Called in the event loop."""

    def events(self, request: AnyRequest, session: str) -> AsyncGenerator[Any, None]:
        """Runs a request on one replica: None once it is accepted, then its events; or the
        exception that refuses it. Requests of one session go to one replica, as long as it is there
        and has room. Raises ReplicaLost."""
        ...

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of all replicas, and returns what they answer; waits for some seconds at
        most."""
        ...


@dataclass(eq=False)
class _Call:
    """One request that runs elsewhere."""

    request: AnyRequest
    session: str
    handle: Handle[Any]
    since: float
    limit_s: float | None
    settled: list[list[int]] = field(default_factory=list)  # tokens that the client's side has
    lost: int = 0  # replicas that were lost with it
    has_begun: bool = False  # whether an event went on
    is_waiting: bool = True  # until a replica accepts it
    task: asyncio.Task[None] | None = None
    ending: Failed = field(default=Failed("cancelled", "the request was cancelled"))

    @property
    def may_run_again(self) -> bool:
        return not (self.has_begun and self.request.streams) and self.lost < RUNS


def session_of(request: AnyRequest) -> str:
    """What the client names in a header; else a name for what the turns of one conversation have in
    common: a digest of its messages up to the first of a user, of the first ids, or of a decision's
    state."""
    if named := next((request.call[name] for name in _SESSIONS if name in request.call), None):
        return named
    begin: Any = None
    if isinstance(request, DecisionRequest):
        begin = request.state if isinstance(request.state, str) else list(request.state)
    elif isinstance(request, Request) and request.messages is not None:
        users = (at for at, each in enumerate(request.messages, 1) if each.get("role") == "user")
        begin = list(request.messages[: next(users, None)])
    elif isinstance(request, Request):
        begin = request.prompt if request.ids is None else list(request.ids[:_KEY])
    begin = begin[:_KEY] if isinstance(begin, str) else without_pixels(begin)
    return sha256(json.dumps(begin, default=str).encode()).hexdigest()[:32]


class EngineClient(AnyEngine):
    """Made in the event loop that it works in, with replicas that have reported once."""

    def __init__(
        self,
        model: Model,
        facts: Facts,
        reports: Sequence[Report],
        replicas: Replicas,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """model: without weights, as `load_outline` gives it."""
        super().__init__(model, facts.config, facts.longest, clock)
        self.served = replace(self.served, device=facts.device)
        self.on_finish: Callable[[AnyRequest, Terminal], None] = lambda request, terminal: None
        self._adapters, self._replicas = facts.adapters, replicas
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # else they might be collected
        self._began, self._heard, self._reports = clock(), clock(), reports
        self._closed: str | None = None

    # What the loop does.

    def start(self) -> EngineClient:
        """Begins to ask replicas how they are doing."""
        self._spawn(self._watch())
        return self

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        # In a context of its own: what a client's request leads to must not end with that request.
        task = self._loop.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        while True:
            try:
                if reports := await self._replicas.all("report"):
                    self._reports, self._heard = reports, self._clock()
            except Exception:
                log.exception("the replicas cannot be asked how they are doing")
            if why := self._absence:
                for call in [each for each in self._calls.values() if each.is_waiting]:
                    call.ending = Failed("not_ready", why)
                    if call.task is not None:
                        call.task.cancel()
            await asyncio.sleep(REPORT_S)

    def _begin(self, call: _Call) -> None:
        call.task = self._spawn(self._follow(call))

    async def _follow(self, call: _Call) -> None:
        """Runs a request to its end, on one replica after another where they are lost."""
        late = Failed("timeout", f"the request took longer than its {call.limit_s} s")
        terminal: Terminal = Failed("internal", "the request was lost; the log says why")
        try:
            left = self._left(call)
            async with asyncio.timeout(None if left is None else left + GRACE_S):
                terminal = await self._ran(call)
        except TimeoutError:
            terminal = late
        except asyncio.CancelledError:
            terminal = call.ending
        except Exception as error:
            terminal = Failed(*explain(error))
            log.exception("request %s failed", call.request.id)
        finally:
            del self._calls[call.request.id]
            call.handle.deliver(terminal, partial(self._report, call.request, terminal))

    async def _ran(self, call: _Call) -> Terminal:
        """The terminal event. Raises what is wrong with this process alone."""
        while True:
            try:
                return await self._run(call)
            except ReplicaLost as error:
                call.lost += 1
                log.warning("request %s: a replica was lost: %s", call.request.id, error)
            if call.handle.cancelled:
                return call.ending
            if not call.may_run_again:
                return Failed(
                    "internal",
                    "the replica that answered is gone, and a part of the answer was sent already; "
                    "send the request again"
                    if call.has_begun and call.request.streams
                    else f"{call.lost} replicas were lost while they had this request",
                )
            call.is_waiting = True
            await asyncio.sleep(AGAIN_S * 2 ** (call.lost - 1))

    async def _run(self, call: _Call) -> Terminal:
        """Runs a request on one replica. Raises ReplicaLost."""
        # Clocks of other processes are others.
        request = replace(call.request, since=None, timeout_s=self._left(call))
        # Where its own replica was lost, the others share its sessions.
        session = f"{call.session}-{call.lost}" if call.lost else call.session
        seen, events = 0, self._replicas.events(request, session)
        try:
            async for event in events:
                call.is_waiting = False
                if event is None:
                    continue
                if isinstance(event, EngineDead) or _is_shutdown(event):
                    raise ReplicaLost(str(event))
                if isinstance(event, Exception):
                    refused = event if isinstance(event, Refused) else None
                    return Failed(*explain(event), refused=refused)
                if isinstance(event, Terminal):
                    return event
                if isinstance(event, Settled) and seen < len(call.settled):
                    if event.token_ids != call.settled[seen]:
                        return Failed("internal", "another replica wrote another text")
                    seen += 1
                else:
                    self._pass_on(call, event)
                    seen += isinstance(event, Settled)
        finally:
            await events.aclose()
        raise ReplicaLost("its events ended without the last one")

    def _pass_on(self, call: _Call, event: Any) -> None:
        if isinstance(event, Settled):
            call.settled.append(event.token_ids)
        elif isinstance(event, Draft):
            event = replace(event, decode=self.model.tokenizer.decode)
        call.has_begun = True
        call.handle.deliver(event)

    def _wake(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._stop(request_id)))

    async def _stop(self, request_id: str) -> None:
        """Lets the replica end a request with what it has, and ends it here where that fails."""
        call = self._calls.get(request_id)
        if call is None or call.task is None:  # it has ended
            return
        if not call.is_waiting:
            await self._replicas.all("cancel", request_id)
            await asyncio.wait({call.task}, timeout=CANCEL_S)
        call.task.cancel()

    def _left(self, call: _Call) -> float | None:
        """Seconds of its time limit; not all replicas set the same."""
        if call.limit_s is None:
            return None
        return max(0.001, call.limit_s - (self._clock() - call.since))

    # For clients: any thread may call. What a replica refuses comes as an event.

    def _put(
        self, request: AnyRequest, make: Callable[[], Job], sink: Callable[[Any], None] | None
    ) -> Handle[Any]:
        if self._closed is not None:
            raise EngineDead(self._closed)
        if why := self._absence:
            raise NotReady(why, REPORT_S)
        since = self._clock() if request.since is None else request.since
        self._check_adapter(request)
        make()  # what it refuses, no replica would do
        if sum(call.is_waiting for call in tuple(self._calls.values())) >= self.config.queue:
            raise QueueFull(
                f"{self.config.queue} requests wait for a replica already, which is the limit; try "
                "again later, or raise --queue or --replicas"
            )
        if request.seed is None:
            request = replace(request, seed=secrets.randbits(53))
        session = session_of(request)
        handle: Handle[Any] = Handle(request.id, sink, partial(self._wake, request.id))
        call = _Call(request, session, handle, since, self._limit_s(request))
        self._calls[request.id] = call
        self._loop.call_soon_threadsafe(self._begin, call)
        return handle

    def check(self, request: Request) -> None:
        with self.refusals(request):
            self._check_adapter(request)
            self._job(request)

    def _check_adapter(self, request: AnyRequest) -> None:
        name = request.adapter
        if name is not None and name not in self._adapters:
            raise Refused("adapter", f"there is no adapter {name!r:.99}")

    def _report(self, request: AnyRequest, terminal: Terminal) -> None:
        try:
            self.on_finish(request, terminal)
        except Exception:
            log.exception("request %s: on_finish failed", request.id)

    @property
    def death(self) -> str | None:
        """None: other replicas take the place of those that end."""
        return None

    @property
    def _absence(self) -> str | None:
        silent_s = self._clock() - self._heard
        return f"no replica has answered for {silent_s:.0f} s" if silent_s > ABSENT_S else None

    def health(self) -> Health:
        each = [report.health for report in self._reports]
        reason = None if any(one.ok for one in each) else next((one.reason for one in each), None)
        reason = self._closed or self._absence or reason
        waiting = sum(call.is_waiting for call in tuple(self._calls.values()))
        waiting += sum(one.waiting for one in each)
        running = sum(one.running for one in each)
        return Health(reason is None, reason, self._clock() - self._began, waiting, running)

    def state(self) -> EngineState:
        state = merged([report.state for report in self._reports])
        return replace(state, waiting=self.health().waiting)

    def used_memory(self) -> int | None:
        used = [report.used_memory for report in self._reports]
        return None if None in used else sum(each or 0 for each in used)

    def reset_prefix_cache(self) -> Future[int]:
        async def emptied() -> int:
            return sum(await self._replicas.all("reset_prefix_cache"))

        return asyncio.run_coroutine_threadsafe(emptied(), self._loop)

    @property
    def adapters(self) -> Mapping[str, NamedAdapter]:
        return self._adapters

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
        """Ends what runs here; the replicas are others' to end."""
        self._closed, until = self._closed or "the server is shutting down", self._clock() + drain_s
        while self._calls and self._clock() < until:
            time.sleep(0.05)
        for call in tuple(self._calls.values()):
            call.ending = Failed("shutdown", self._closed)
        for task in tuple(self._tasks):
            self._loop.call_soon_threadsafe(task.cancel)


def _is_shutdown(event: Any) -> bool:
    return isinstance(event, Failed) and event.kind == "shutdown"


def merged(states: Sequence[EngineState]) -> EngineState:
    """The state of several engines as that of one. The slots of each come after those of the one
    before, and are numbered so."""
    slots, running = list[SlotState](), list[RowState]()
    for state in states:
        base = len(slots)
        slots += [replace(slot, index=base + slot.index) for slot in state.slots]
        running += [
            replace(row, slot=None if row.slot is None else base + row.slot)
            for row in state.running
        ]
    first, histories = states[0], [state.history for state in states]
    speeds = _summed([state.speeds for state in states])
    return replace(
        first,
        waiting=sum(state.waiting for state in states),
        running=tuple(running),
        slots=tuple(slots),
        totals=_summed([state.totals for state in states]),
        speeds=replace(  # the others are rates
            speeds,
            ms_per_step=speeds.ms_per_step / len(states),
            rows_per_forward=speeds.rows_per_forward / len(states),
        ),
        history=History(
            first.history.grain_s,
            _latest([history.canvas_tokens for history in histories]),
            _latest([history.rows for history in histories]),
        ),
        snapshot_bytes=sum(state.snapshot_bytes for state in states),
        larger_bytes=sum(state.larger_bytes for state in states),
        circuit_open=all(state.circuit_open for state in states),
    )


def _summed(parts: Sequence[Figures]) -> Figures:
    """The sums of all fields."""
    columns = zip(*([getattr(each, of.name) for of in fields(each)] for each in parts), strict=True)
    return type(parts[0])(*(sum(others, first) for first, *others in columns))


def _latest(histories: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The sums of figures that are of the same times counted from the last one."""
    rows = zip_longest(*(reversed(each) for each in histories), fillvalue=0)
    return tuple(sum(row) for row in rows)[::-1]
