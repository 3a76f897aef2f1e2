"""Routes about responses that are kept: read, delete, cancel, and the items of their input."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sfumato.refused import Refused
from sfumato.server.http import request_body
from sfumato.server.http.errors import ApiError
from sfumato.server.http.security import OWNER
from sfumato.server.http.wire import SSE, named_event
from sfumato.server.openapi import fails
from sfumato.server.response_store import Item, Missing, Stored
from sfumato.server.service import Service

_PATH = "/v1/responses/{response_id}"
_MOST_LISTED, _LISTED = 100, 20  # items, as OpenAI has them
_IN_PROGRESS = "in_progress"
_LOOK_S = 0.25  # how often a stream looks whether its response has ended
_MOST_DIGITS = 9
_SHOWN: dict[int | str, dict[str, Any]] = fails(400, 404) | {
    200: {
        "description": "The response, as one body or as its last event.",
        "content": {SSE.media_type: {"schema": {}}},
    }
}


def add_routes(app: FastAPI, service: Service) -> None:
    """The four routes below `/v1/responses`."""

    @app.get(
        _PATH,
        tags=["OpenAI"],
        responses=_SHOWN,
        openapi_extra=_queries("stream", "starting_after"),
    )
    async def response(request: Request, response_id: str) -> Response:
        """A response that is kept; as a stream, its last event, once it has ended."""
        after = _starting_after(request)
        if not _wants_stream(request):
            return await run_in_threadpool(_response, service, request, response_id)
        owner = _entry(service, request, response_id).owner
        events = _until_its_end(service, owner, response_id, after)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type=SSE.media_type, headers=headers)

    @app.delete(_PATH, tags=["OpenAI"], responses=fails(404))
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        """Forgets a response; one that is being made goes on."""
        try:
            service.responses.remove(_owner(request), response_id)
        except Missing:
            raise _missing(response_id) from None
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(f"{_PATH}/cancel", tags=["OpenAI"], responses=fails(404, 408))
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Ends a response that is being made in a stream; others stay as they are."""
        await request_body.discard(request)
        entry = _entry(service, request, response_id)
        if entry.status == _IN_PROGRESS:
            running = service.running.get(_request_id(response_id))
            if running is not None:
                running.cancel()
        return await run_in_threadpool(_response, service, request, response_id)

    @app.get(
        f"{_PATH}/input_items",
        tags=["OpenAI"],
        responses=fails(400, 404),
        openapi_extra=_queries("order", "limit", "after"),
    )
    async def input_items(request: Request, response_id: str) -> dict[str, Any]:
        """The items that a response answers, the last one first."""
        return await run_in_threadpool(_input_items, service, request, response_id)


def _wants_stream(request: Request) -> bool:
    """Raises ApiError."""
    given = request.query_params.get("stream", "false").lower()
    if given not in ("false", "0", "true", "1"):
        raise Refused("stream", "must be true or false")
    return given in ("true", "1")


def _starting_after(request: Request) -> int | None:
    """The number of the last event that the client has seen. Raises ApiError."""
    given = request.query_params.get("starting_after")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS):
        raise Refused("starting_after", f"must be a number of at most {_MOST_DIGITS} digits")
    return int(given)


async def _until_its_end(
    service: Service, owner: str, name: str, after: int | None
) -> AsyncIterator[str]:
    """The last event of a response, which has all of it. after: the number of an event that is not
    sent again."""
    sent, number = time.monotonic(), 0 if after is None else after + 1
    while True:
        try:
            entry = service.responses.get(owner, name)
        except Missing:
            missing = {"type": "error", "code": "not_found", "message": _missing(name).message}
            yield named_event(missing | {"param": None, "sequence_number": number})
            return
        if entry.status != _IN_PROGRESS:
            break
        await asyncio.sleep(_LOOK_S)
        if time.monotonic() - sent >= service.settings.keepalive_s:
            yield SSE.keepalive
            sent = time.monotonic()
    kind = entry.status if entry.status in ("completed", "failed") else "incomplete"
    response = await run_in_threadpool(json.loads, entry.response)
    last = {"type": f"response.{kind}", "sequence_number": number, "response": response}
    yield named_event(last)


def _response(service: Service, request: Request, name: str) -> Response:
    """Raises ApiError."""
    entry = _entry(service, request, name)
    if entry.status != _IN_PROGRESS:
        return Response(entry.response, media_type="application/json")
    running = service.running.get(_request_id(name))
    is_going = running is not None and running.is_going
    fields = json.loads(entry.response)
    return JSONResponse(fields if is_going else fields | {"status": "cancelled"})


def _input_items(service: Service, request: Request, name: str) -> dict[str, Any]:
    """Raises ApiError."""
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise Refused("order", "must be asc or desc")
    given = query.get("limit", str(_LISTED))
    is_number = given.isascii() and given.isdecimal() and len(given) <= 3
    limit = int(given) if is_number else 0
    if not 1 <= limit <= _MOST_LISTED:
        raise Refused("limit", f"must be from 1 to {_MOST_LISTED}")
    items = _inputs(service, request, name)
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise Refused("after", "is the id of none of these items")
        items = items[at + 1 :]
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


def _inputs(service: Service, request: Request, name: str) -> list[Item]:
    """The body's own input, behind the inputs and outputs of earlier responses that are still
    here."""
    owner, store = _owner(request), service.responses
    entry = _entry(service, request, name)
    before = store.remaining(owner, entry.previous, service.settings.max_messages)
    earlier = [item for one in before for item in (*one.inputs, *one.outputs)]
    return [*earlier, *entry.inputs]


def _entry(service: Service, request: Request, name: str) -> Stored:
    try:
        return service.responses.get(_owner(request), name)
    except Missing:
        raise _missing(name) from None


def _owner(request: Request) -> str:
    owner: str = request.scope.get(OWNER, "")
    return owner


def _request_id(name: str) -> str:
    """The id of the request that makes a response."""
    return f"req-{name.removeprefix('resp_')}"


def _missing(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {name[:128]!r} here; it was not kept, was deleted, or was forgotten "
        "(--response-store)",
        "response_id",
        "not_found",
    )


_QUERIES = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 10**_MOST_DIGITS - 1},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED, "default": _LISTED},
    "after": {"type": "string"},
}


def _queries(*names: str) -> dict[str, Any]:
    """The API description of query parameters that the route reads itself."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": _QUERIES[name]}
            for name in names
        ]
    }
