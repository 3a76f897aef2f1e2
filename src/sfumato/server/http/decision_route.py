"""The route function of typed decisions: body → its form → one request → answers, all at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.datastructures import Headers
from fastapi.responses import Response

from sfumato.engine import Decided, DecisionRequest, EngineClient, Failed
from sfumato.server.http import answer, inflight, request_body
from sfumato.server.http.decision_dialect import DecisionCall, DecisionDialect
from sfumato.server.http.errors import (
    CLIENT_GONE,
    ERROR_FORM,
    OPENAI_ERRORS,
    ApiError,
    WrongField,
    bad_request,
    from_failed,
    from_refusal,
)
from sfumato.server.schemas.decisions import DecisionBody
from sfumato.server.service import Service

_FIELD = re.compile(r"(?P<field>state|questions)\b(\.(?P<number>\d+)(?=:))?")
"""Which of the engine's fields a message begins with. Ids of listed questions are numbers."""


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
        except ApiError as error:
            error.field = WrongField((), error.message, error.code or "json_invalid")
            raise
        data.clear()
        http.scope[ERROR_FORM] = OPENAI_ERRORS  # of a body of no form, or of two
        dialect = route.by_body(http.headers, value)
        http.scope[ERROR_FORM] = dialect.errors
        return request_body.validated(value, dialect.body_type, lenient=True)

    async with request_body.read_with(service, http, decode) as body:
        call = await run_in_threadpool(dialect.parse, service, route.path, body)
    del body
    return await _answer(dialect, service, http, call)


async def _answer(
    dialect: DecisionDialect[Any], service: Service, http: HttpRequest, call: DecisionCall
) -> Response:
    headers = {"X-Request-Id": call.request.id}
    if dialect.errors.request_id:
        headers[dialect.errors.request_id] = call.request.id
    try:
        decided = await _decided(service.engine, http, call.request)
    except ApiError as error:
        error.headers |= headers
        _in_the_bodys_words(error, dialect)
        raise
    return await run_in_threadpool(lambda: answer.response(call.answer(decided), headers))


async def _decided(engine: EngineClient, http: HttpRequest, request: DecisionRequest) -> Decided:
    """Waits for the answers. Raises ApiError where the engine refuses the request, where the
    request fails, and where the client has disconnected, which cancels the request."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Decided | Failed] = loop.create_future()

    def end(event: Decided | Failed) -> None:
        if not ended.done():
            ended.set_result(event)

    def deliver(event: Decided | Failed) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(end, event)

    try:
        handle = await run_in_threadpool(engine.decide, request, deliver)
    except Exception as error:
        raise from_refusal(error, request) from None
    disconnected = asyncio.create_task(inflight.disconnect(http))
    waits: set[asyncio.Future[Any]] = {ended, disconnected}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise ApiError(CLIENT_GONE, "the client has disconnected")
        event = ended.result()
    finally:
        handle.cancel()
        disconnected.cancel()
    if isinstance(event, Failed):
        raise from_failed(event)
    return event


def _in_the_bodys_words(error: ApiError, dialect: DecisionDialect[Any]) -> None:
    """Gives a refusal of the engine the names that fields have in the body."""
    named = _FIELD.match(error.message)
    if error.status != 400 or named is None:
        return
    field, number = named["field"], named["number"]
    if field == "state":
        error.param = dialect.state
    elif number is not None and dialect.listed:
        error.param = f"questions[{number}]"
    else:
        error.param = named[0]
    text = error.message[named.end() :]
    error.message = error.param + text
    error.field = WrongField((field,), text.lstrip(".: "), error.code or "value_error")


async def _refuse_multipart(http: HttpRequest) -> None:
    """System One's clients send images in bodies of several parts."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        await request_body.discard(http)
        raise bad_request(
            f"Content-Type: {kind[:40]} is how images are sent, which are not supported yet; send "
            "JSON without assets",
            code="unsupported",
        )
