"""What an application answers where a route raises: every failure in the form of its dialect."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import StarletteHTTPException as HTTPException
from fastapi.responses import Response
from fastapi.routing import APIRoute

from sfumato.server.http.errors import ApiError, internal

log = logging.getLogger(__name__)


def add_handlers(app: FastAPI) -> None:
    """Every failure of a route in the same shape."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, status = request.url.path, error.status_code
        headers = dict(error.headers) if error.headers else {}
        if status in (404, 405):
            # Where no route takes it the page's files are looked through, which say one or the
            # other by the method alone.
            methods = _methods(app, path)
            status = 405 if methods else 404
            headers = {"Allow": ", ".join(sorted(methods))} if methods else {}
        said = {
            404: f"there is no {request.method} {path[:200]}; /docs lists what there is",
            405: f"{path[:200]} takes another method",
        }
        answer = ApiError(status, said.get(status, str(error.detail)), headers=headers)
        return answer.response(request.scope)

    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return internal().response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)


def _methods(app: FastAPI, path: str) -> set[str]:
    """What routes of that path take; nothing where there are none."""
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path_regex.match(path):
            found |= route.methods or set()
    return found
