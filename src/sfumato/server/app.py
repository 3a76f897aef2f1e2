"""`create_app`: an engine, settings and dialects become an ASGI application. Routes stand here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles

from sfumato import __version__
from sfumato.engine import Engine
from sfumato.server import info, replay, tokenizing
from sfumato.server.dialects import DECISIONS, DIALECTS, by_path
from sfumato.server.dialects.anthropic.forms import CountBody
from sfumato.server.dialects.ollama import info as ollama
from sfumato.server.dialects.ollama.forms import OllamaShowBody
from sfumato.server.dialects.responses.routes import add_routes as add_response_routes
from sfumato.server.http import decisions, error_handlers, route
from sfumato.server.http.decisions import DecisionRoute
from sfumato.server.http.dialect import Dialect
from sfumato.server.http.observe import AuditLine, Observer
from sfumato.server.http.security import Framing, Gate
from sfumato.server.metrics import CONTENT_TYPE, Metrics
from sfumato.server.openapi import add_reference, fails, takes
from sfumato.server.plain_routes import add_gets, add_posts
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.server.tokenizing import DetokenizeBody, TemplateBody, TokenizeBody

__all__ = ["ServerSettings", "create_app"]

PAGE = Path(__file__).parent / "page"
_ABOUT = (
    "Block-diffusion language models behind OpenAI's API. docs/api.md says of every field whether "
    "it is honoured, refused or ignored."
)


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    metrics: Metrics | None = None,
    audit: AuditLine | None = None,
    dialects: Sequence[Dialect[Any]] = DIALECTS,
) -> FastAPI:
    """engine: started by its owner, who closes it too; metrics: those that see each request's end
    (None: figures of the engine and of HTTP alone); audit: takes lines of requests that never reach
    the engine."""
    service = Service(engine, settings or ServerSettings())
    metrics = metrics or Metrics(engine)
    app = FastAPI(
        title="Sfumato",
        version=__version__,
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for dialect in dialects:
        _add_dialect(app, service, dialect)
    for each in DECISIONS:
        _add_decisions(app, service, each)
    add_response_routes(app, service)
    _add_models(app, service)
    add_posts(app, service, [tokenizing.COUNT_TOKENS])
    add_gets(app, service, ollama.GETS)
    add_posts(app, service, [ollama.SHOW])
    add_posts(app, service, tokenizing.ROUTES)
    _add_info(app, service)
    _add_metrics(app, service, metrics)
    bodies = [dialect.body_type for dialect in dialects]
    forms_of_decisions = [dialect for each in DECISIONS for dialect in each.dialects]
    bodies += [dialect.body_type for dialect in forms_of_decisions]
    forms = [each.errors for each in dialects] + [each.errors for each in forms_of_decisions]
    others = (TokenizeBody, DetokenizeBody, TemplateBody, CountBody, OllamaShowBody)
    add_reference(app, (*bodies, *others), forms)
    if service.settings.page:
        _add_replay(app)
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    error_handlers.add_handlers(app)
    app.add_middleware(Gate, settings=service.settings, form_of=by_path(dialects, DECISIONS))
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(Framing)  # before a preflight is answered, too
    app.add_middleware(Observer, routes=app.routes, metrics=metrics, audit=audit)  # outermost
    return app


def _add_dialect(app: FastAPI, service: Service, dialect: Dialect[Any]) -> None:
    async def generate(request: Request) -> Response:
        return await route.reply(dialect, service, request)

    app.add_api_route(
        dialect.path,
        generate,
        methods=["POST"],
        name=dialect.name,
        description=dialect.help,
        tags=[dialect.tag],
        **takes(dialect.body_type, stream=dialect.wire.media_type, forms=[dialect.errors]),
    )
    for alias in dialect.aliases:
        app.add_api_route(alias, generate, methods=["POST"], include_in_schema=False)


def _add_decisions(app: FastAPI, service: Service, each: DecisionRoute) -> None:
    async def decide(request: Request) -> Response:
        return await decisions.reply(each, service, request)

    app.add_api_route(
        each.path,
        decide,
        methods=["POST"],
        name=each.name,
        description=each.help,
        tags=[each.tag],
        **takes(
            *(dialect.body_type for dialect in each.dialects),
            forms=[dialect.errors for dialect in each.dialects],
        ),
    )


def _add_models(app: FastAPI, service: Service) -> None:
    add_gets(app, service, [info.MODELS])

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], responses=fails(404))
    async def model_named(model: str) -> dict[str, Any]:
        """The model that is loaded, by its name."""
        return info.model_named(service, model)


def _add_info(app: FastAPI, service: Service) -> None:
    add_gets(app, service, info.GETS)

    @app.get("/slots", tags=["llama-server"], responses=fails(503))
    async def slots(fail_on_no_slot: str = "") -> list[dict[str, Any]]:
        """Each slot, and what it does, as llama-server has it."""
        return info.slots(service, bool(fail_on_no_slot))

    add_gets(app, service, info.FURTHER_GETS)

    @app.post("/reset_prefix_cache", tags=["vLLM"], responses=fails(503))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Slots that are free forget what they hold."""
        return await info.reset_prefix_cache(service)


def _add_metrics(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/metrics", tags=["server"], response_class=Response, responses=fails())
    def metrics_text() -> Response:
        """Prometheus' text format."""
        started = {"Process-Start-Time-Unix": str(service.started)}  # as llama-server has it
        return Response(metrics.text(), media_type=CONTENT_TYPE, headers=started)


def _add_replay(app: FastAPI) -> None:
    @app.get("/replay.html", include_in_schema=False)
    def replay_template() -> HTMLResponse:
        """What the page fills when a replay is shared; its own scripts do not run from here."""
        return HTMLResponse(replay.template())
