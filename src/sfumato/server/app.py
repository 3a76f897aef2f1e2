"""`create_app`: an engine and settings become an ASGI application. The routes stand here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from sfumato import __version__
from sfumato.engine import Engine
from sfumato.server import info, reference, replay
from sfumato.server.dialects import llama_cpp, openai_chat, openai_completions
from sfumato.server.http import errors
from sfumato.server.http.observe import AuditLine, Observer
from sfumato.server.http.security import Gate
from sfumato.server.metrics import CONTENT_TYPE, Metrics
from sfumato.server.schemas import rules
from sfumato.server.schemas.llama_cpp import DetokenizeBody, LlamaBody, TemplateBody, TokenizeBody
from sfumato.server.schemas.openai import ChatBody, CompletionBody
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

STATIC = Path(__file__).parent / "page"
_ABOUT = (
    "Block-diffusion language models behind OpenAI's API. docs/api.md says of every field whether "
    "it is honoured, refused or ignored."
)


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    metrics: Metrics | None = None,
    audit: AuditLine | None = None,
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
    _add_openai(app, service)
    _add_llama(app, service)
    _add_info(app, service, metrics)
    _add_reference(app)
    if service.settings.page:
        _add_replay(app)
        app.mount("/", StaticFiles(directory=STATIC, html=True), name="page")
    errors.add_handlers(app)
    app.add_middleware(Gate, settings=service.settings)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(Observer, routes=app.routes, metrics=metrics, audit=audit)  # outermost
    return app


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_FAILS = {
    400: rules.described(),
    401: "The API key is missing or wrong.",
    403: "A page of another origin, or another host name.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "A fault of the server.",
    503: "The engine is shutting down, or has no memory.",
    504: "The deadline has passed.",
}


def _fails(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the answers other than 200: these, and those of any route."""
    return {
        status: {"description": _FAILS[status], "content": _ERROR}
        for status in sorted({401, 403, 413, 500, *statuses})
    }


def _takes(model: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    """How a POST route that reads its body itself is described."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers = _fails(400, 408, 429, 503, 504)
    if streams:
        answers[200] = {
            "description": "The reply, whole or as server-sent events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    return {"openapi_extra": {"requestBody": body}, "responses": answers}


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", tags=["OpenAI"], **_takes(ChatBody, True))
    async def chat_completions(request: Request) -> Response:
        """The reply to a conversation, whole or as a stream of chunks."""
        return await openai_chat.complete(service, request)

    @app.post("/v1/completions", tags=["OpenAI"], **_takes(CompletionBody, True))
    async def text_completions(request: Request) -> Response:
        """Text that goes on from a prompt, without a chat template."""
        return await openai_completions.complete(service, request)

    @app.get("/v1/models", tags=["OpenAI"], responses=_fails())
    async def models() -> dict[str, Any]:
        """The model that is loaded."""
        return info.models(service)

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], responses=_fails(404))
    async def model_named(model: str) -> dict[str, Any]:
        """The model that is loaded, by its name."""
        return info.model_named(service, model)


def _add_llama(app: FastAPI, service: Service) -> None:
    @app.post("/completion", tags=["llama-server"], **_takes(LlamaBody, True))
    async def completion(request: Request) -> Response:
        """A completion as llama-server has it."""
        return await llama_cpp.completion(service, request)

    @app.post("/tokenize", tags=["llama-server"], **_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Text to token ids."""
        return await llama_cpp.tokenize(service, request)

    @app.post("/detokenize", tags=["llama-server"], **_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""
        return await llama_cpp.detokenize(service, request)

    @app.post("/apply-template", tags=["llama-server"], **_takes(TemplateBody))
    async def apply_template(request: Request) -> Response:
        """The prompt that messages become."""
        return await llama_cpp.apply_template(service, request)


def _add_info(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", tags=["server"], responses=_fails(503))
    async def live() -> Response:
        """200 while the engine lives, ready or not; 503: start the server again."""
        return info.alive(service)

    @app.head("/health", include_in_schema=False)
    @app.head("/v1/health", include_in_schema=False)
    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["server"], responses=_fails(503))
    @app.get("/health", tags=["server"], responses=_fails(503))
    @app.get("/v1/health", tags=["server"], include_in_schema=False)
    async def health() -> Response:
        """200 while requests are taken, else 503 with the reason."""
        return info.health(service)

    @app.get("/props", tags=["server"], responses=_fails())
    async def props() -> dict[str, Any]:
        """The model's properties, defaults and the server's limits."""
        return info.props(service)

    @app.get("/slots", tags=["server"], responses=_fails())
    async def slots() -> dict[str, Any]:
        """Slots, the requests that run, the queue, totals and speeds."""
        return info.slots(service)

    @app.get("/memory", tags=["server"], responses=_fails())
    async def memory() -> dict[str, Any]:
        """Memory as predicted, and as there is."""
        return info.memory(service)

    @app.get("/tokenizer_info", tags=["vLLM"], responses=_fails())
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's special tokens and the chat template."""
        return info.tokenizer_info(service)

    @app.post("/reset_prefix_cache", tags=["vLLM"], responses=_fails(503))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Slots that are free forget what they hold."""
        return await info.reset_prefix_cache(service)

    @app.get("/metrics", tags=["server"], response_class=Response, responses=_fails())
    def metrics_text() -> Response:
        """Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_replay(app: FastAPI) -> None:
    @app.get("/replay.html", include_in_schema=False)
    def replay_template() -> HTMLResponse:
        """What the page fills when a replay is shared; its own scripts do not run from here."""
        return HTMLResponse(replay.template())


def _add_reference(app: FastAPI) -> None:
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = described()
            parts = description.setdefault("components", {}).setdefault("schemas", {})
            for model in (
                *(ChatBody, CompletionBody, LlamaBody),
                *(TokenizeBody, DetokenizeBody, TemplateBody),
            ):
                whole = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts |= whole.pop("$defs", {})
                parts[model.__name__] = whole
            parts["Error"] = errors.SCHEMA
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own manual has it

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """What can be asked of this server."""
        return HTMLResponse(reference.page(app.openapi()))
