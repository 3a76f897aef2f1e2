"""The one route function of all dialects: body → requests → a reply or a stream."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from sfumato.engine import Request
from sfumato.server.http import inflight, request_body, stream
from sfumato.server.http.dialect import Dialect, Frame
from sfumato.server.http.errors import in_the_words_of
from sfumato.server.http.wire import json_response
from sfumato.server.schemas.body import Body
from sfumato.server.service import Service

B = TypeVar("B", bound=Body)


async def reply(dialect: Dialect[B], service: Service, http: HttpRequest) -> Response:
    """Raises Refused."""
    with in_the_words_of(dialect.wording):
        return await _reply(dialect, service, http)


def _parsed(dialect: Dialect[B], service: Service, body: B) -> tuple[Frame | None, list[Request]]:
    """What answers the body at once, or the requests that it asks for. Raises ApiError."""
    fields = dialect.at_once(service, body)
    return fields, [] if fields is not None else dialect.parse(service, body)


async def _reply(dialect: Dialect[B], service: Service, http: HttpRequest) -> Response:
    async with request_body.read(service, http, dialect.body_type) as body:
        fields, requests = await run_in_threadpool(_parsed, dialect, service, body)
        if fields is not None:
            if dialect.streams(body):
                return Response(dialect.wire.encode(fields), media_type=dialect.wire.media_type)
            return json_response(fields, {})
    body = request_body.without_large_fields(body)
    renderer = dialect.renderer(service, body, requests)
    running = await inflight.start(service.engine, requests, http, dialect.writing_s(body))
    service.running[running.id] = running
    if dialect.streams(body):
        return stream.response(service, running, renderer, dialect)
    replies = await inflight.collect(http, running, renderer.keeps_settled)
    headers = inflight.headers_of(running, dialect.errors.request_id)
    return await run_in_threadpool(lambda: json_response(renderer.body(replies), headers))
