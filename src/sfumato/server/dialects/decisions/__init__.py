"""The routes of typed decisions, and which form a body at `/v1/decisions` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.datastructures import Headers

from sfumato.refused import Refused
from sfumato.server.dialects.decisions.gemini import GEMINI_DECISIONS, KEY_HEADER
from sfumato.server.dialects.decisions.openai import OPENAI_DECISIONS
from sfumato.server.dialects.decisions.systemone import PATH, SYSTEM_ONE
from sfumato.server.http.decisions import DecisionDialect, DecisionRoute

_FORMS = (
    "state with questions as an object (System One), input with questions as a list (OpenAI), or "
    f"input with questions as an object and the header {KEY_HEADER} (Gemini)"
)


def by_headers(headers: Headers) -> DecisionDialect[Any]:
    """The form of errors of a body that cannot be read."""
    return GEMINI_DECISIONS if KEY_HEADER in headers else OPENAI_DECISIONS


def by_body(headers: Headers, body: Mapping[str, Any]) -> DecisionDialect[Any]:
    """Raises Refused for a body of no form, and for one of two."""
    has_state, has_input = (body.get(name) is not None for name in ("state", "input"))
    questions = body.get("questions")
    if has_state and not has_input and isinstance(questions, dict):
        return SYSTEM_ONE
    if has_input and not has_state:
        if isinstance(questions, list):
            return OPENAI_DECISIONS
        if isinstance(questions, dict) and KEY_HEADER in headers:
            return GEMINI_DECISIONS
    raise Refused(None, f"the body must have one of three forms: {_FORMS}", code="unknown_form")


ROUTES = (
    DecisionRoute(
        name="systemone",
        path=PATH,
        tag="decisions",
        help="System One: questions about a state, answered with probabilities.",
        dialects=(SYSTEM_ONE,),
        by_headers=lambda headers: SYSTEM_ONE,
        by_body=lambda headers, body: SYSTEM_ONE,
    ),
    DecisionRoute(
        name="decisions",
        path="/v1/decisions",
        tag="decisions",
        help=f"Questions answered with probabilities: {_FORMS}.",
        dialects=(OPENAI_DECISIONS, SYSTEM_ONE, GEMINI_DECISIONS),
        by_headers=by_headers,
        by_body=by_body,
    ),
)
