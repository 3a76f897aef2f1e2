"""System One (TypeSafe's Jev): questions about a state, answered with probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import (
    Field,
    WithJsonSchema,
)

from sfumato.diffusion.constraints.questions import Answer, Question
from sfumato.engine import Decided
from sfumato.refused import Refused
from sfumato.server.dialects.decisions.questions import (
    DESCRIBED,
    TEXT,
    DecisionBody,
    Loc,
    MapQuestion,
    NoulCriteria,
    NoulQuestion,
    ScoreQuestion,
    Text,
    answer_of,
    check_decides,
    no_images,
    question_of,
    questions_schema,
    read_map,
    reader,
    request_of,
    text_of,
)
from sfumato.server.http.decisions import DecisionCall, DecisionDialect
from sfumato.server.http.errors import ApiError, ErrorForm
from sfumato.server.http.security import KeyRefused
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.json_schemas import closed
from sfumato.server.service import Service

SYSTEM_ONE_QUESTIONS = questions_schema(
    closed({}, {"true": DESCRIBED, "false": DESCRIBED}), DESCRIBED, TEXT
)


class SystemOneBody(DecisionBody):
    model: str | None = Field(
        None, description="At /v1/systemone: jev-latest, any other jev- name, or the model's own."
    )
    state: Text = Field(description="What all questions are about.")
    questions: Annotated[Any, WithJsonSchema(SYSTEM_ONE_QUESTIONS)] = Field(
        description="Id → question. Ids come back as they are, and never reach the model."
    )
    assets: Annotated[Any, WithJsonSchema(json_schemas.NULL)] = Field(
        None, description="Refused unless null: images are not supported yet."
    )


read_system_one: Callable[..., MapQuestion] = reader(MapQuestion)
"""Validates one question; raises pydantic's ValidationError."""

PATH = "/v1/systemone"
_JEV = "jev-"  # what clients send by default begins with it; the answer has the model's own name
OVERLOADED = 529
_ERROR_TYPES = {
    400: "api_usage_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    408: "timeout_error",
    413: "request_too_large_error",
    415: "api_usage_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

_PLACE = {"type": "array", "items": {"type": ["string", "integer"]}}
_WRONG = {
    "type": "object",
    "properties": {"loc": _PLACE, "msg": {"type": "string"}, "type": {"type": "string"}},
    "required": ["loc", "msg", "type"],
}
_OTHER = {
    "type": "object",
    "properties": {"error_type": {"type": "string"}, "message": {"type": "string"}},
    "required": ["error_type", "message"],
}
ERROR_SCHEMA = {
    "type": "object",
    "properties": {"detail": {"anyOf": [{"type": "array", "items": _WRONG}, _OTHER]}},
    "required": ["detail"],
}


def parse(service: Service, endpoint: str, body: SystemOneBody) -> DecisionCall:
    """Raises ApiError."""
    check_decides(service)
    if endpoint == PATH:
        _check_model(service, body.model)
    if body.assets is not None:
        raise no_images("assets")
    state = text_of(body.state, ("state",))
    typed, questions = read_map(service, body.questions, read_system_one, _question, True)
    request = request_of(body, endpoint, state, questions)
    return DecisionCall(request, partial(_body, service.name, typed))


def _check_model(service: Service, name: str | None) -> None:
    """Refuses other models, as System One does, and unlike OpenAI's routes: a client of several
    servers names the model that it means. Perplexity's client, with names of its own, posts to
    /v1/decisions. Raises ApiError."""
    served = (service.name, *service.settings.aliases)
    if name is None or name in served or service.settings.lenient or name.startswith(_JEV):
        return
    raise Refused(
        "model",
        f"{name[:200]!r} is not served here",
        f"send jev-latest or {service.name!r}, or start the server with --alias or --lenient",
        code="model_not_found",
    )


def _question(typed: MapQuestion, loc: Loc) -> Question:
    instructions = text_of(typed.instructions, (*loc, "instructions"))
    given = typed.criteria if isinstance(typed, NoulQuestion) else None
    criteria = given or NoulCriteria()
    yes = text_of(criteria.true, (*loc, "criteria", "true"))
    no = text_of(criteria.false, (*loc, "criteria", "false"))
    return question_of(typed, instructions, (yes, no), loc)


def _body(model: str, typed: Mapping[str, MapQuestion], decided: Decided) -> Mapping[str, Any]:
    usage = decided.usage
    return {
        "model": model,
        "answers": {name: _answer(one, decided.answers[name]) for name, one in typed.items()},
        "usage": {
            "input_tokens": usage.input_tokens,
            "output_tokens": len(typed),
            "x_cached_tokens": usage.cached_tokens,
            "x_reads": usage.reads,
        },
    }


def _answer(typed: MapQuestion, answer: Answer) -> dict[str, Any]:
    levels = typed.criteria if isinstance(typed, ScoreQuestion) else ()
    return answer_of(typed, answer, levels)


def error_status(error: ApiError) -> int:
    """System One's status of an error."""
    if isinstance(error, KeyRefused) and error.missing:
        return 403
    if error.code == "context_length_exceeded":
        return 413
    if error.code in ("bodies_busy", "memory"):
        return OVERLOADED
    return 422 if error.status == 400 and error.field else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    status = error_status(error)
    if status == 422 and error.field:
        field = error.field
        detail = {"loc": ["body", *field.loc], "msg": field.message, "type": field.kind}
        return {"detail": [detail]}
    kind = _ERROR_TYPES.get(status, "api_error")
    if isinstance(error, KeyRefused):
        kind = _ERROR_TYPES[401]
    return {"detail": {"error_type": kind, "message": error.message}}


SYSTEM_ONE = DecisionDialect(
    body_type=SystemOneBody,
    parse=parse,
    errors=ErrorForm(
        error_body,
        error_status,
        "SystemOneError",
        ERROR_SCHEMA,
        request_id="x-typesafe-request-id",
        statuses=(422, 529),
    ),
)
