"""The API description: what FastAPI cannot see of routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from sfumato.server import reference
from sfumato.server.http import errors
from sfumato.server.schemas import rules

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_FAILS = {
    400: rules.described(),
    401: "The API key is missing or wrong.",
    403: "A page of another origin, or another host name.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than zstd.",
    429: "The queue is full.",
    500: "A fault of the server.",
    503: "The engine is shutting down, or has no memory.",
    504: "The deadline has passed.",
}


def fails(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the answers other than 200: these, and those of any route."""
    return {
        status: {"description": _FAILS[status], "content": _ERROR}
        for status in sorted({401, 403, 413, 500, *statuses})
    }


def takes(*models: type[BaseModel], stream: str | None = None) -> dict[str, Any]:
    """The OpenAPI description of a POST route that reads its body itself: one of the models.
    stream: the media type of the stream that it may answer with."""
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    schema: dict[str, Any] = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers = fails(400, 408, 415, 429, 503, 504)
    if stream:
        answers[200] = {
            "description": "The reply, as one body or as a stream.",
            "content": {stream: {"schema": {"type": "string"}}},
        }
    return {"openapi_extra": {"requestBody": body}, "responses": answers}


def add_reference(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> None:
    """/openapi.json with the schemas of the bodies, and /docs."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = without_bodies()
            parts = description.setdefault("components", {}).setdefault("schemas", {})
            for model in bodies:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts |= schema.pop("$defs", {})
                parts[model.__name__] = schema
            parts["Error"] = errors.SCHEMA
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own manual has it

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The API description as a page."""
        return HTMLResponse(reference.page(app.openapi()))
