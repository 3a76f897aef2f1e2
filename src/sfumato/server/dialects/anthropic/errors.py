"""Anthropic's form of errors: its kinds and statuses, and words that its clients look for."""

from __future__ import annotations

from typing import Any

from sfumato.server.http.errors import ApiError, ErrorForm

OVERLOADED = 529
_BUSY = ("memory", "bodies_busy", "queue_full")  # codes of a 503 that passes by itself
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# error.details of a field that is refused, by which clients know that they can go on without it.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error"],
}


def status_of(error: ApiError) -> int:
    """529 for what passes by itself; a server that is not ready answers 503."""
    return OVERLOADED if error.status == 503 and error.code in _BUSY else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(status_of(error), "invalid_request_error")
    details = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error), **details},
        "request_id": error.headers.get("X-Request-Id"),
    }


def _message(error: ApiError) -> str:
    """Agents shorten their conversation where a message begins with "prompt is too long"."""
    if error.code != "context_length_exceeded":
        return error.message
    prompt, context = error.more.get("n_prompt_tokens"), error.more.get("n_ctx")
    numbers = "" if None in (prompt, context) else f": {prompt} tokens > {context} maximum"
    return f"prompt is too long{numbers}. {error.message}"


ANTHROPIC_ERRORS = ErrorForm(
    error_body,
    status_of,
    name="AnthropicError",
    schema=_SCHEMA,
    request_id="request-id",
    statuses=(OVERLOADED,),
)
