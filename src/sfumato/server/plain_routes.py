"""Routes that generate nothing, as values: what is read of the server, and small questions.

Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from sfumato.server.http import request_body
from sfumato.server.http.errors import OPENAI_ERRORS, ErrorForm, Wording, in_the_words_of
from sfumato.server.openapi import fails, takes
from sfumato.server.schemas.body import Body
from sfumato.server.service import Service

B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class Get:
    """One GET route."""

    path: str
    name: str  # in the API description, as the next two
    tag: str
    help: str
    answer: Callable[[Service], Any]
    shape: Any = dict[str, Any]  # of the answer; None: it is a response
    statuses: tuple[int, ...] = ()  # of errors, beside those of any route
    form: ErrorForm = OPENAI_ERRORS
    has_head: bool = False
    hidden: bool = False  # from the API description


@dataclass(frozen=True)
class Post(Generic[B]):
    """One POST route whose body is a small question."""

    path: str
    name: str
    tag: str
    help: str
    body_type: type[B]
    answer: Callable[[Service, B], dict[str, Any]]  # in a thread; raises Refused
    statuses: tuple[int, ...] = ()
    form: ErrorForm = OPENAI_ERRORS
    wording: Wording = field(default_factory=dict)


def add_gets(app: FastAPI, service: Service, routes: Iterable[Get]) -> None:
    for route in routes:
        _add_get(app, service, route)


def add_posts(app: FastAPI, service: Service, routes: Iterable[Post[Any]]) -> None:
    for route in routes:
        _add_post(app, service, route)


def _add_get(app: FastAPI, service: Service, route: Get) -> None:
    async def get() -> Any:
        return route.answer(service)

    app.add_api_route(
        route.path,
        get,
        methods=["GET"],
        name=route.name,
        description=route.help,
        tags=[route.tag],
        response_model=route.shape,
        responses=fails(*route.statuses, forms=[route.form]),
        include_in_schema=not route.hidden,
    )
    if route.has_head:
        app.add_api_route(
            route.path, get, methods=["HEAD"], response_model=None, include_in_schema=False
        )


def _add_post(app: FastAPI, service: Service, route: Post[B]) -> None:
    async def post(request: Request) -> Response:
        with in_the_words_of(route.wording):
            async with request_body.read(service, request, route.body_type) as body:
                return JSONResponse(await run_in_threadpool(route.answer, service, body))

    description = takes(route.body_type, forms=[route.form])
    if route.statuses:
        description["responses"] |= fails(*route.statuses, forms=[route.form])
    app.add_api_route(
        route.path,
        post,
        methods=["POST"],
        name=route.name,
        description=route.help,
        tags=[route.tag],
        **description,
    )
