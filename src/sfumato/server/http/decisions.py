"""Typed decisions over HTTP: body → its form → one request → answers, all at once.

A `DecisionDialect` is one form: it turns a body into the engine's request and its answers into a
body. A `DecisionRoute` is a path for one form or several. Bodies, threads, disconnects and statuses
are the route function's. Knows no dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.datastructures import Headers
from fastapi.responses import Response

from sfumato.engine import Decided, DecisionRequest, Engine, Failed, Handle
from sfumato.refused import Refused
from sfumato.server.dialects.decisions.questions import DecisionBody
from sfumato.server.http import inflight, request_body
from sfumato.server.http.errors import (
    CLIENT_GONE,
    ERROR_FORM,
    OPENAI_ERRORS,
    ApiError,
    ErrorForm,
    WrongField,
    from_failed,
    from_refusal,
)
from sfumato.server.http.wire import json_response
from sfumato.server.service import Service

B = TypeVar("B", bound=DecisionBody)


@dataclass(frozen=True)
class DecisionCall:
    """A request, and how its answers are rendered."""

    request: DecisionRequest
    answer: Callable[[Decided], Mapping[str, Any]]  # in a thread


@dataclass(frozen=True)
class DecisionDialect(Generic[B]):
    """One form of a request for decisions, and of its answers and errors."""

    body_type: type[B]
    parse: Callable[[Service, str, B], DecisionCall]  # endpoint; in a thread; raises Refused
    errors: ErrorForm = OPENAI_ERRORS
    state: str = "state"  # the field that holds what the engine calls the state
    listed: bool = False  # questions are a list, and their ids are their numbers


class PendingDecision:
    """A request that the engine has, or is being given."""

    def __init__(self, engine: Engine, request: DecisionRequest) -> None:
        self._engine, self._request = engine, request
        self._handle: Handle[Decided] | None = None
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Decided | Failed] = self._loop.create_future()

    async def begin(self) -> None:
        """Submits the request, whose texts are tokenized for that in a thread. Raises ApiError
        where the engine refuses it. A caller who is cancelled meanwhile cancels the request."""
        try:
            await run_in_threadpool(self._submit)
        except Exception as error:
            raise from_refusal(error, self._request) from None
        except BaseException:
            self.cancel()
            raise

    async def result(self, http: HttpRequest) -> Decided:
        """Waits for the answers. Raises ApiError where the request fails, and where the client has
        disconnected, which cancels the request."""
        disconnected = asyncio.create_task(inflight.disconnect(http))
        waits: set[asyncio.Future[Any]] = {self._ended, disconnected}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                raise ApiError(CLIENT_GONE, "the client has disconnected")
            event = self._ended.result()
        finally:
            self.cancel()
            disconnected.cancel()
        if isinstance(event, Failed):
            raise from_failed(event)
        return event

    def cancel(self) -> None:
        """Does nothing once the request has ended."""
        self._cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def _submit(self) -> None:
        """In a thread."""
        self._handle = self._engine.decide(self._request, self._deliver)
        if self._cancelled:  # in the meantime
            self._handle.cancel()

    def _deliver(self, event: Decided | Failed) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self._end, event)

    def _end(self, event: Decided | Failed) -> None:
        if not self._ended.done():
            self._ended.set_result(event)


@dataclass(frozen=True)
class DecisionRoute:
    """One POST route for decisions in one form or several."""

    name: str  # in the API description
    path: str
    tag: str
    help: str
    dialects: tuple[DecisionDialect[Any], ...]
    # The form of an error before a body is read, and the body's own. The second raises ApiError.
    by_headers: Callable[[Headers], DecisionDialect[Any]]
    by_body: Callable[[Headers, Mapping[str, Any]], DecisionDialect[Any]]


async def reply(route: DecisionRoute, service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    await _refuse_multipart(http)
    dialect = route.by_headers(http.headers)

    def decode(data: bytearray) -> DecisionBody:
        nonlocal dialect
        try:
            value = request_body.parse(data, service.settings.max_values, names_repeat=False)
        except Refused as error:
            answer = ApiError.of(error)
            answer.field = WrongField((), answer.message, answer.code or "json_invalid")
            raise answer from None
        data.clear()
        http.scope[ERROR_FORM] = OPENAI_ERRORS  # of a body of no form, or of two
        dialect = route.by_body(http.headers, value)
        http.scope[ERROR_FORM] = dialect.errors
        return request_body.validated(value, dialect.body_type, lenient=True)

    async with request_body.read_with(service, http, decode) as body:
        call = await run_in_threadpool(dialect.parse, service, route.path, body)
        del body
        pending = PendingDecision(service.engine, call.request)
        with _explained(dialect, call.request):
            # Within, since the questions are tokenized there.
            await pending.begin()
    with _explained(dialect, call.request):
        decided = await pending.result(http)
    headers = _headers(dialect, call.request)
    return await run_in_threadpool(lambda: json_response(call.answer(decided), headers))


def _headers(dialect: DecisionDialect[Any], request: DecisionRequest) -> dict[str, str]:
    headers = {"X-Request-Id": request.id}
    if dialect.errors.request_id:
        headers[dialect.errors.request_id] = request.id
    return headers


@contextmanager
def _explained(dialect: DecisionDialect[Any], request: DecisionRequest) -> Iterator[None]:
    """Gives an ApiError that is raised within the request's id and the body's words."""
    try:
        yield
    except ApiError as error:
        error.headers |= _headers(dialect, request)
        _in_the_bodys_words(error, dialect)
        raise


def _in_the_bodys_words(error: ApiError, dialect: DecisionDialect[Any]) -> None:
    """Gives a refusal of the engine the names that fields have in the body. Ids of listed
    questions are numbers."""
    refused = error.refused
    if refused is None or refused.field is None:
        return
    root, _, name = refused.field.partition(".")
    if root not in ("state", "questions"):
        return
    names = {"state": dialect.state}
    if dialect.listed and name.isdecimal():
        names[refused.field] = f"questions[{name}]"
    error.rename(names)
    if root == "questions" and not name.isdecimal():
        error.param = root
    text = f"{name}: {refused.reason}" if name and not name.isdecimal() else refused.reason
    error.field = WrongField((root,), text, error.code or "value_error")


async def _refuse_multipart(http: HttpRequest) -> None:
    """System One's clients send images in bodies of several parts."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        await request_body.discard(http)
        raise Refused(
            None,
            f"Content-Type: {kind[:40]} is how images are sent, which are not supported yet",
            "send JSON without assets",
            code="unsupported",
        )
