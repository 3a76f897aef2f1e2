"""Gemini's decisions: System One's questions and answers about an input of typed parts.

Confidence is the probability of the winner here, of yes/no questions too."""

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
from sfumato.server.dialects.decisions.questions import (
    STRING,
    TEXT,
    WORDS,
    ChoiceQuestion,
    DecisionBody,
    Loc,
    NoulQuestion,
    Part,
    ScoreQuestion,
    answer_of,
    check_decides,
    describe,
    named,
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
from sfumato.server.http.request_body import refusal
from sfumato.server.schemas.json_schemas import NULL, closed, either
from sfumato.server.service import Service

_GEMINI_TEXT = closed({"type": {"const": "text"}, "text": WORDS}, {"annotations": {}})

GEMINI_INPUT = either(STRING, _GEMINI_TEXT, {"type": "array", "items": _GEMINI_TEXT})

GEMINI_QUESTIONS = questions_schema(
    closed({}, dict.fromkeys(("true_description", "false_description"), either(STRING, NULL))),
    either(*GEMINI_INPUT["anyOf"], NULL),
    TEXT,
)


class GeminiDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(GEMINI_INPUT)] = Field(
        description="Text, or parts of text."
    )
    questions: Annotated[Any, WithJsonSchema(GEMINI_QUESTIONS)] = Field(
        description="Id → question."
    )


class GeminiCriteria(Part):
    true_description: str | None = None
    false_description: str | None = None


class GeminiNoulQuestion(NoulQuestion):
    criteria: GeminiCriteria | None = None  # type: ignore[assignment]


Typed = GeminiNoulQuestion | ChoiceQuestion | ScoreQuestion
read_gemini: Callable[..., Typed] = reader(Typed)
"""Validates one question; raises pydantic's ValidationError."""

KEY_HEADER = "x-goog-api-key"
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


def parse(service: Service, endpoint: str, body: GeminiDecisionBody) -> DecisionCall:
    """Raises ApiError."""
    check_decides(service)
    state = parts_text(body.input, ("input",))
    typed, questions = read_map(service, body.questions, read_gemini, _question)
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
    given = typed.criteria if isinstance(typed, GeminiNoulQuestion) else None
    criteria = given or GeminiCriteria()
    described = (criteria.true_description or "", criteria.false_description or "")
    return question_of(typed, instructions, described, loc)


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
    given = typed.criteria if isinstance(typed, ScoreQuestion) else ()
    levels = [text_of(level, ()) for level in given]
    return answer_of(typed, answer, levels) | {"confidence": max(answer.probabilities)}


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
