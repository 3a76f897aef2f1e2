"""Exception handlers: what a route raises becomes an answer in the form of its dialect."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import StarletteHTTPException as HTTPException
from fastapi.responses import Response
from fastapi.routing import APIRoute

from sfumato.refused import Refused
from sfumato.server.http.errors import ApiError, internal

log = logging.getLogger(__name__)

# OpenAI's routes that are not here, though they look like the id of a response.
_NOT_HERE = {"/v1/responses/input_tokens", "/v1/responses/compact"}


def add_handlers(app: FastAPI) -> None:
    """Renders every failure of a route with the error form of its path."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return ApiError.of(error).response(request.scope)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, status = request.url.path, error.status_code
        headers = dict(error.headers) if error.headers else {}
        if status in (404, 405):
            # A request without a route reaches the page's files, which answer 404 or 405 by the
            # method alone.
            allowed = set() if path in _NOT_HERE else _methods(app, path)
            status = 405 if allowed else 404
            headers = {"Allow": ", ".join(sorted(allowed))} if allowed else {}
        messages = {
            404: f"there is no {request.method} {path[:200]}; /docs lists what there is",
            405: f"{path[:200]} takes another method",
        }
        answer = ApiError(status, messages.get(status, str(error.detail)), headers=headers)
        return answer.response(request.scope)

    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return internal().response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)


def _methods(app: FastAPI, path: str) -> set[str]:
    """The methods of the routes of that path; empty where there is no route."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path_regex.match(path):
            methods |= route.methods or set()
    return methods
