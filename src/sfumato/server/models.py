"""The models of a server, of which one is loaded at a time, and how another takes its place.

A request enters before it asks a model for anything, and leaves when its answer has been sent.
Requests enter in the order in which they came. Where the first of them names a model that is not
loaded, it waits until no request is inside; then its model replaces the one before, and all that
wait for it enter. The event loop of the server does everything here but loading, which has a
thread. Knows names and engines; what loads a model is given.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from fastapi import Request as HttpRequest

from sfumato.engine import Health
from sfumato.engine.any_engine import JOIN_S, AnyEngine
from sfumato.engine.engine import CLOSING
from sfumato.model.named_adapters import NamedAdapter
from sfumato.refused import Refused
from sfumato.server.http.errors import CLIENT_GONE, GOODBYE, RETRY_LATER, ApiError, without_paths
from sfumato.server.http.inflight import disconnect
from sfumato.server.http.middleware import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_WAITING = 64
"""Requests that wait for a model at most: the body of each is kept."""
WAIT_S = 600.0
"""Seconds that a request waits for a model at most, its loading included."""
AGAIN_S = 60.0
"""Seconds until a model that could not be loaded is tried again."""
DRAIN_S = 30.0  # that cancelled requests of a model may hold up its end
CHECK_S = 0.25
ADAPTER_S = 600.0  # that a step may hold up the loading of an adapter
LOADER = "sfumato-loader"
"""Name of the thread that loads models."""
_INSIDE = "sfumato.inside"  # key of an ASGI scope: whether its request is inside


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that clients may name as a model."""

    base: str  # the model that it belongs to
    path: str
    by_client: bool = False  # whether a client had it loaded: its file may go at any time


MOST_UNLOADED = 1024  # names of unloaded adapters that are refused rather than answered


@dataclass(eq=False)
class _Waiting:
    """A request that waits for a model."""

    scope: Scope
    name: str | None  # of the model; None: the one that is loaded
    turn: asyncio.Future[ApiError | None]


def _no_other(name: str) -> NoReturn:
    raise AssertionError(f"there is no model beside the one that is loaded: {name}")


class Models:
    """Names of models, and the engine of the one that is loaded."""

    def __init__(
        self,
        name: str,
        engine: AnyEngine,
        others: Sequence[str] = (),
        load: Callable[[str], AnyEngine] = _no_other,
        adapters: dict[str, ServedAdapter] | None = None,
    ) -> None:
        """name, engine: of the model that is loaded; load(name): loads one of the others, or the
        first again, and starts its engine. Called in a thread, while no model is loaded; where it
        raises, it leaves no memory behind. adapters: by name those of all models, with which `load`
        loads a model; None: those that the engine's model has."""
        self.names = (name, *others)
        if adapters is None:
            named = engine.adapters.items()
            adapters = {each: ServedAdapter(name, adapter.source) for each, adapter in named}
        self.adapters = adapters
        self.unloaded: dict[str, None] = {}  # names of adapters that were unloaded
        self.name = name  # of the model that is loaded, or was the last one
        self.loading: str | None = None  # the model that is to replace it
        self._engine: AnyEngine | None = engine
        self._load = load
        self._queue: deque[_Waiting] = deque()
        self._inside = 0  # requests that have entered, and not left
        self._failures: dict[str, tuple[float, str]] = {}  # when a model is tried again, and why
        self._is_closed = False
        self._replacement: asyncio.Task[None] | None = None  # else it might be collected

    @property
    def engine(self) -> AnyEngine:
        """The loaded model's. Raises ApiError while no model is loaded."""
        if self._engine is None:
            raise _busy(self._absence)
        return self._engine

    @property
    def is_loaded(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    def _absence(self) -> str:
        """Why no model is loaded."""
        if self.loading is not None:
            return f"the model {self.loading!r} is being loaded"
        return f"no model is loaded: {self._failures[self.name][1]}"

    @property
    def death(self) -> str | None:
        """Why the loaded model's engine has stopped for good; None where it has not."""
        return None if self._engine is None else self._engine.death

    def health(self) -> Health:
        """Whether the loaded model's engine takes requests. Requests that wait count as waiting."""
        if self._engine is None:
            return Health(False, self._absence, 0.0, len(self._queue), 0)
        health = self._engine.health()
        if self.loading is not None:
            health = replace(health, ok=False, reason=self._absence)
        return replace(health, waiting=health.waiting + len(self._queue))

    def under_way(self) -> int:
        """Requests that a drain lets end: those of the loaded model's engine. Requests that wait
        for a model are not among them: `close` ends each with an error."""
        if self._engine is None:
            return 0
        health = self._engine.health()
        return health.running + health.waiting

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
        """Ends the loaded model's engine, see `Engine.close`; requests that wait end with an error,
        and a model that is being loaded is given up. Any thread may call."""
        self._is_closed = True
        engine = self._engine
        if engine is not None:
            engine.close(drain_s, join_s)

    def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter into the model that is loaded. Raises as `Engine.load_adapter`, and
        TimeoutError where that takes longer than ADAPTER_S: it has its name once it is loaded."""
        if name in self.names:
            raise Refused("lora_name", f"{name!r} is the name of a model", "choose another")
        future, served = self.engine.load_adapter(name, path), ServedAdapter(self.name, path, True)

        def enter(done: Future[NamedAdapter]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.adapters[name] = served
                self.unloaded.pop(name, None)

        future.add_done_callback(enter)  # for one that is loaded when no client waits any more
        future.result(ADAPTER_S)
        enter(future)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; requests that named it before are served to their ends."""
        if self.adapters[name].base == self.name:
            self.engine.unload_adapter(name).result(ADAPTER_S)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Refuses the name of an adapter from now on."""
        self.adapters.pop(name, None)  # another request may have unloaded it meanwhile
        self.unloaded[name] = None
        while len(self.unloaded) > MOST_UNLOADED:
            del self.unloaded[next(iter(self.unloaded))]

    def entered(self, http: HttpRequest, name: str | None) -> bool:
        """Lets a request enter at once; False where it has to wait. name: see `wait`."""
        if self._queue or not self._serves(name):
            return False
        self._let_in(http.scope)
        return True

    async def wait(self, http: HttpRequest, name: str | None) -> None:
        """Returns when the request has entered. name: of the model that is to answer; None: the
        one that is loaded then. Raises ApiError."""
        again, reason = self._failures.get(name or self.name, (0.0, ""))
        if not self._serves(name) and time.monotonic() < again:
            raise _failed(name or self.name, reason, again)
        if len(self._queue) >= MOST_WAITING:
            raise _busy(f"{MOST_WAITING} requests wait for a model already, which is the limit")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(http.scope, name, loop.create_future())
        self._queue.append(waiting)
        self._advance()
        leaving, until = asyncio.create_task(disconnect(http)), loop.time() + WAIT_S
        either: set[asyncio.Future[Any]] = {waiting.turn, leaving}
        try:
            while not waiting.turn.done():
                if leaving.done():
                    raise ApiError(CLIENT_GONE, "the client has disconnected")
                if self._is_closed:
                    raise ApiError(503, CLOSING, code="shutdown", headers=RETRY_LATER | GOODBYE)
                if loop.time() > until:
                    raise _busy(f"the turn of this request did not come in {WAIT_S:g} seconds")
                await asyncio.wait(either, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if (error := waiting.turn.result()) is not None:
                raise error
        finally:
            leaving.cancel()
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._advance()

    def leave(self, scope: Scope) -> None:
        """A request has ended, wherever it was."""
        if scope.pop(_INSIDE, False):
            self._inside -= 1
            self._advance()

    def _serves(self, name: str | None) -> bool:
        return self._engine is not None and self.loading is None and name in (None, self.name)

    def _let_in(self, scope: Scope) -> None:
        self._inside += 1
        scope[_INSIDE] = True

    def _answer(self, waiting: _Waiting, error: ApiError | None = None) -> None:
        """Ends the wait of a request: it enters, or it gets an error."""
        self._queue.remove(waiting)
        if error is None:
            self._let_in(waiting.scope)
        waiting.turn.set_result(error)

    def _advance(self) -> None:
        """Lets in those whose turn it is, and begins to replace the model for the first one that
        wants another."""
        if self._is_closed:  # each finds that by itself
            return
        while self._queue and self._serves(self._queue[0].name):
            self._answer(self._queue[0])
        if self._queue and not self._inside and self.loading is None:
            self.loading = self._queue[0].name or self.name
            self._replacement = asyncio.create_task(self._replace(self.loading))

    async def _replace(self, name: str) -> None:
        """Ends the engine of the model that is loaded, and loads another; where that fails, the one
        before again. Whatever fails, the requests that wait for it get an error, and others go
        on."""
        before = self.name
        try:
            await self._end(before, name)
            for each in dict.fromkeys((name, before)):
                self.loading, began = each, time.monotonic()
                made = await _in_thread(partial(self._attempt, each))
                if not isinstance(made, str):
                    self.name, self._engine = each, made
                    for name, adapter in self.adapters.copy().items():
                        if adapter.base == each and name not in made.adapters:
                            self._forget(name)
                    self._failures.pop(each, None)
                    log.info("the model %s was loaded in %.1f s", each, time.monotonic() - began)
                    break
                self._fail(each, made)
        except Exception as error:
            log.exception("the model %s cannot take the place of %s", name, before)
            for each in dict.fromkeys((name, before)):
                self._fail(each, type(error).__name__)
        finally:
            self.loading = None
            for waiting in tuple(self._queue):  # once: who comes later waits behind the others
                if self._serves(waiting.name):
                    self._answer(waiting)
            self._advance()

    async def _end(self, before: str, name: str) -> None:
        """Ends the engine that there is, whose model makes room for another."""
        if self._engine is not None:
            log.info("the model %s makes room for %s", before, name)
            try:
                await _in_thread(partial(self._engine.close, DRAIN_S))
            finally:
                self._engine = None

    def _fail(self, name: str, reason: str) -> None:
        """Remembers why a model was not loaded; requests that wait for it get the reason."""
        again = time.monotonic() + AGAIN_S
        self._failures[name] = again, reason
        for waiting in tuple(self._queue):
            if (waiting.name or self.name) == name:
                self._answer(waiting, _failed(name, reason, again))

    def _attempt(self, name: str) -> AnyEngine | str:
        """An engine of a model, or why there is none. In a thread: no error leaves it, whose
        traceback would keep the memory of what was loaded."""
        if self._is_closed:
            return CLOSING
        try:
            engine = self._load(name)
        except Exception as error:  # the allocators of devices have errors of their own
            log.error("the model %s cannot be loaded: %s", name, error)
            return without_paths(" ".join(str(error).split())) or type(error).__name__
        if self._is_closed:  # meanwhile
            engine.close(join_s=0.0)
            return CLOSING
        return engine


def leaving(app: ASGIApp, models: Models) -> ASGIApp:
    """Lets each request leave when its answer has been sent, or when it ends otherwise."""

    async def left(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            models.leave(scope)

    return left


async def _in_thread(work: Callable[[], T]) -> T:
    """Does it in a thread for which the end of the process does not wait."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a client that waits may leave before the end

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=LOADER, daemon=True).start()
    return await asyncio.wrap_future(done)


def _busy(why: str) -> ApiError:
    return ApiError(503, f"{why}; try again later", code="model_loading", headers=dict(RETRY_LATER))


def _failed(name: str, reason: str, again: float) -> ApiError:
    """again: when the model is tried again, by the monotonic clock."""
    seconds = str(max(1, round(again - time.monotonic())))
    message = f"the model {name!r} cannot be loaded: {reason}"
    return ApiError(503, message, code="model_unavailable", headers={"Retry-After": seconds})
