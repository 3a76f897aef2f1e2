"""The API description: what FastAPI cannot see of routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from sfumato.server import reference
from sfumato.server.http import errors
from sfumato.server.schemas import rules

_FAILS = {
    400: rules.described(),
    401: "The API key is missing or wrong.",
    403: "A page of another origin, or another host name.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than zstd.",
    422: "A field is wrong, unknown or not supported, or a rule is broken that 400 lists.",
    429: "The queue is full.",
    500: "A fault of the server.",
    503: "The engine is shutting down, or has no memory.",
    504: "The deadline has passed.",
    529: "The server is overloaded.",
}


def fails(
    *statuses: int, forms: Iterable[errors.ErrorForm] = (errors.OPENAI_ERRORS,)
) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the answers other than 200: these, and those of any route."""
    content = {"application/json": {"schema": _any_of(form.name for form in forms)}}
    return {
        status: {"description": _FAILS[status], "content": content}
        for status in sorted({401, 403, 413, 500, *statuses})
    }


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    schemas = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0]


def takes(
    *models: type[BaseModel],
    stream: str | None = None,
    forms: Sequence[errors.ErrorForm] = (errors.OPENAI_ERRORS,),
) -> dict[str, Any]:
    """The OpenAPI description of a POST route that reads its body itself: one of the models.
    stream: the media type of the stream that it may answer with. forms: of its errors."""
    schema = _any_of(model.__name__ for model in models)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    others = {status for form in forms for status in form.statuses}
    answers = fails(400, 408, 415, 429, 503, 504, *others, forms=forms)
    if stream:
        answers[200] = {
            "description": "The reply, as one body or as a stream.",
            "content": {stream: {"schema": {}}},  # of events, whose data are objects
        }
    return {"openapi_extra": {"requestBody": body}, "responses": answers}


def add_reference(
    app: FastAPI, bodies: Iterable[type[BaseModel]], forms: Iterable[errors.ErrorForm] = ()
) -> None:
    """/openapi.json with the schemas of the bodies and of the forms of errors, and /docs."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = without_bodies()
            parts = description.setdefault("components", {}).setdefault("schemas", {})
            for model in bodies:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts |= schema.pop("$defs", {})
                parts[model.__name__] = schema
            for form in (errors.OPENAI_ERRORS, *forms):
                parts[form.name] = dict(form.schema)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own manual has it

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The API description as a page."""
        return HTMLResponse(reference.page(app.openapi()))
