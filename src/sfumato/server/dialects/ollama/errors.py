"""Ollama's form of errors: one text."""

from __future__ import annotations

from typing import Any

from sfumato.server.http.errors import ApiError, ErrorForm

_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA_ERRORS = ErrorForm(error_body, name="OllamaError", schema=_SCHEMA)
