"""Ollama's routes that generate nothing, as routes of an application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sfumato.server.dialects.ollama import info
from sfumato.server.dialects.ollama.errors import OLLAMA_ERRORS
from sfumato.server.http import request_body
from sfumato.server.openapi import fails, takes
from sfumato.server.schemas.ollama import OllamaShowBody
from sfumato.server.service import Service

TAG = "Ollama"


def add_routes(app: FastAPI, service: Service) -> None:
    """Adds them to the application."""
    answers = fails(forms=[OLLAMA_ERRORS])

    @app.head("/api/version", include_in_schema=False)
    @app.get("/api/version", tags=[TAG], responses=answers)
    async def version() -> dict[str, Any]:
        """The version of Ollama whose API this is."""
        return info.version()

    @app.head("/api/tags", include_in_schema=False)
    @app.get("/api/tags", tags=[TAG], responses=answers)
    async def tags() -> dict[str, Any]:
        """The model under each of its names."""
        return info.tags(service)

    @app.get("/api/ps", tags=[TAG], responses=answers)
    async def running() -> dict[str, Any]:
        """The model, which is always loaded."""
        return info.running(service)

    description = takes(OllamaShowBody, forms=[OLLAMA_ERRORS])
    description["responses"] |= fails(404, forms=[OLLAMA_ERRORS])

    @app.post("/api/show", tags=[TAG], **description)
    async def show(request: Request) -> Response:
        """The model's properties and what it can do."""
        async with request_body.read(service, request, OllamaShowBody) as body:
            return JSONResponse(info.show(service, body))
