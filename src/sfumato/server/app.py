"""`create_app`: models, settings and dialects become an ASGI application. Routes stand here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from sfumato import __version__
from sfumato.server import adapters, info, render, replay
from sfumato.server.batch_routes import BatchBody
from sfumato.server.batch_routes import add_routes as add_batch_routes
from sfumato.server.dialects import DECISIONS, DIALECTS, by_path, decisions, ollama
from sfumato.server.dialects.anthropic import COUNT_TOKENS
from sfumato.server.dialects.responses.renderer import add_routes as add_response_routes
from sfumato.server.http import errors, route
from sfumato.server.http.middleware import AuditLine, Gate, framing, observer
from sfumato.server.http.route import Dialect, Get, Post
from sfumato.server.metrics import Metrics
from sfumato.server.models import Models, leaving
from sfumato.server.openapi import add_reference, fails, takes
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

PAGE = Path(__file__).parent / "page"
_ABOUT = (
    "Block-diffusion language models behind OpenAI's API. docs/api.md says of every field whether "
    "it is honoured, refused or ignored."
)


def create_app(
    models: Models,
    settings: ServerSettings | None = None,
    metrics: Metrics | None = None,
    audit: AuditLine | None = None,
    dialects: Sequence[Dialect[Any]] = DIALECTS,
) -> FastAPI:
    """models: one of which has an engine, started by its owner, who closes it too; metrics: those
    that see each request's end (None: figures of the engine and of HTTP alone);
    audit: takes lines of requests that never reach the engine. What the settings say of batches
    becomes `state.batches`, whose `resume` goes on with those that were left."""
    settings = settings or ServerSettings()
    metrics = metrics or Metrics(models.engine)
    service = Service(models, settings, on_picture=metrics.picture)
    app = FastAPI(
        title="Sfumato",
        version=__version__,
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    posts = (*dialects, COUNT_TOKENS, ollama.SHOW, *info.POSTS, *render.POSTS, *adapters.POSTS)
    for post in posts:
        _add_post(app, service, post)
    for each in DECISIONS:
        _add_decisions(app, service, each)
    add_response_routes(app, service)
    app.state.batches = add_batch_routes(app, service)
    for get in (*info.GETS, *ollama.GETS, *adapters.GETS):
        _add_get(app, service, get)
    info.add_routes(app, service)
    _add_metrics(app, service, metrics)
    forms = [form for each in DECISIONS for form in each.dialects]
    described = [(post.body_type, post.errors) for post in posts]
    described.append((BatchBody, errors.OPENAI_ERRORS))
    add_reference(app, described + [(form.body_type, form.errors) for form in forms])
    if service.settings.page:
        _add_replay(app)
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    errors.add_handlers(app)
    files = _page_paths() if service.settings.page else frozenset()
    form_of = by_path(posts, DECISIONS)
    app.add_middleware(leaving, models=models)
    app.add_middleware(Gate, settings=service.settings, form_of=form_of, files=files)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(framing)  # before a preflight is answered, too
    app.add_middleware(observer, routes=app.routes, metrics=metrics, audit=audit)  # outermost
    return app


def _add_get(app: FastAPI, service: Service, get: Get) -> None:
    async def answer() -> Any:
        return get.answer(service)

    app.add_api_route(
        get.path,
        answer,
        methods=["GET"],
        name=get.name,
        description=get.help,
        tags=[get.tag],
        response_model=get.shape,
        responses=fails(*get.statuses, forms=[get.errors]),
        include_in_schema=not get.hidden,
    )
    if get.has_head:
        app.add_api_route(
            get.path, answer, methods=["HEAD"], response_model=None, include_in_schema=False
        )


def _add_post(app: FastAPI, service: Service, post: Post[Any]) -> None:
    async def answer(request: Request) -> Response:
        return await route.reply(post, service, request)

    stream = post.wire.media_type if isinstance(post, Dialect) else None
    described = takes(post.body_type, stream=stream, statuses=post.statuses, forms=[post.errors])
    app.add_api_route(
        post.path,
        answer,
        methods=["POST"],
        name=post.name,
        description=post.help,
        tags=[post.tag],
        **described,
    )
    for alias in post.aliases:
        app.add_api_route(alias, answer, methods=["POST"], include_in_schema=False)


def _add_decisions(app: FastAPI, service: Service, each: decisions.DecisionRoute) -> None:
    async def decide(request: Request) -> Response:
        return await decisions.reply(each, service, request)

    app.add_api_route(
        each.path,
        decide,
        methods=["POST"],
        name=each.name,
        description=each.help,
        tags=["decisions"],
        **takes(
            *(dialect.body_type for dialect in each.dialects),
            forms=[dialect.errors for dialect in each.dialects],
        ),
    )


def _add_metrics(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/metrics", tags=["server"], response_class=Response, responses=fails())
    def metrics_text() -> Response:
        """Prometheus' text format."""
        started = {"Process-Start-Time-Unix": str(service.started)}  # as llama-server has it
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST, headers=started)


def _page_paths() -> frozenset[str]:
    """The paths of the page and of all its files: what every installation of the package has."""
    names = (path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
    return frozenset(("/", *(f"/{name}" for name in names)))


def _add_replay(app: FastAPI) -> None:
    @app.get("/replay.html", include_in_schema=False)
    def replay_template() -> HTMLResponse:
        """What the page fills when a replay is shared; its own scripts do not run from here."""
        return HTMLResponse(replay.template())
