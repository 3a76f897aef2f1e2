"""Gemini's decisions: System One's questions and answers about an input of typed parts.

Confidence is the probability of the winner here, of yes/no questions too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sfumato.diffusion.constraints.answers import Answer
from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.engine import Decided
from sfumato.server.dialects.shared import typed_answers
from sfumato.server.dialects.shared.decisions import (
    Loc,
    check_decides,
    checked,
    checked_map,
    named,
    no_images,
    read_question,
    request_of,
    text_of,
)
from sfumato.server.http.decision_dialect import DecisionCall, DecisionDialect
from sfumato.server.http.errors import ApiError, ErrorForm
from sfumato.server.http.request_body import refusal
from sfumato.server.schemas import decisions as schema
from sfumato.server.schemas.decision_schemas import describe
from sfumato.server.schemas.decisions import GeminiDecisionBody
from sfumato.server.service import Service

KEY_HEADER = "x-goog-api-key"
TYPES = ("noul", "choice", "score")
_MEDIA = ("image", "document", "audio", "video")
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

Typed = schema.GeminiNoulQuestion | schema.ChoiceQuestion | schema.ScoreQuestion


def parse(service: Service, endpoint: str, body: GeminiDecisionBody) -> DecisionCall:
    """Raises ApiError."""
    check_decides(service)
    state = parts_text(body.input, ("input",))
    typed: dict[str, Typed] = {}
    questions: dict[str, Question] = {}
    for name, value in checked_map(body.questions).items():
        loc = ("questions", name)
        one = read_question(schema.read_gemini, value, loc, TYPES, service.settings.lenient)
        typed[name], questions[name] = one, checked(_question(one, loc), loc)
    request = request_of(body, endpoint, state, questions)
    return DecisionCall(request, partial(_body, typed))


def parts_text(given: Any, loc: Loc) -> str:
    """A text, a part, or parts, as one text with a line each. Raises ApiError."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return "\n".join(parts_text(part, (*loc, at)) for at, part in enumerate(given))
    if not isinstance(given, dict):
        wrong = f"must be text or parts, and not {describe(given)}"
        raise refusal(loc, wrong, "string_type")
    if given.get("type") in _MEDIA:
        raise no_images(named(loc))
    text = given.get("text")
    if given.get("type") != "text" or not isinstance(text, str):
        raise refusal(loc, "must be a part with a type and a text", "literal_error")
    return text


def _question(typed: Typed, loc: Loc) -> Question:
    at = (*loc, "instructions")
    instructions = "" if typed.instructions is None else parts_text(typed.instructions, at)
    loc = (*loc, "criteria")
    if isinstance(typed, schema.GeminiNoulQuestion):
        criteria = typed.criteria or schema.GeminiCriteria()
        return YesNoQuestion(
            instructions, criteria.true_description or "", criteria.false_description or ""
        )
    if isinstance(typed, schema.ChoiceQuestion):
        options = [Option(name, text_of(it, (*loc, name))) for name, it in typed.criteria.items()]
        return ChoiceQuestion(instructions, tuple(options))
    levels = [text_of(level, (*loc, number)) for number, level in enumerate(typed.criteria)]
    return ScoreQuestion(instructions, tuple(levels))


def _body(typed: Mapping[str, Typed], decided: Decided) -> Mapping[str, Any]:
    usage = decided.usage
    return {
        "answers": {name: _answer(one, decided.answers[name]) for name, one in typed.items()},
        "usage": {
            "total_input_tokens": usage.input_tokens,
            "total_cached_tokens": usage.cached_tokens,
            "total_output_tokens": 0,
            "total_thought_tokens": 0,
            "total_tokens": usage.input_tokens,
            "x_reads": usage.reads,
        },
    }


def _answer(typed: Typed, answer: Answer) -> dict[str, Any]:
    winner = {"confidence": max(answer.probabilities)}
    if isinstance(typed, schema.GeminiNoulQuestion):
        return typed_answers.noul(answer) | winner
    if isinstance(typed, schema.ChoiceQuestion):
        return typed_answers.choice(answer, list(typed.criteria)) | winner
    levels = [text_of(level, ()) for level in typed.criteria]
    return typed_answers.score(answer, levels) | winner


def error_body(error: ApiError) -> dict[str, Any]:
    """Google's form."""
    word = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "status": word}}


_ERROR = {
    "type": "object",
    "properties": {
        "code": {"type": "integer"},
        "message": {"type": "string"},
        "status": {"type": "string"},
    },
    "required": ["code", "message", "status"],
}
ERROR_SCHEMA = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}

GEMINI_DECISIONS = DecisionDialect(
    body_type=GeminiDecisionBody,
    parse=parse,
    errors=ErrorForm(error_body, name="GeminiError", schema=ERROR_SCHEMA),
    state="input",
)
