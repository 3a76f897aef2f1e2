"""The decisions of System One (TypeSafe's Jev) and of Gemini: an object of questions about a state.

Gemini's state is an input of typed parts. Its confidence is the probability of the winner, of
yes/no questions too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints import questions as ask
from sfumato.diffusion.constraints.questions import (
    MOST_LEVELS,
    MOST_OPTIONS,
    MOST_QUESTIONS,
    Answer,
    ChoiceAnswer,
    ScoreAnswer,
    YesNoAnswer,
)
from sfumato.engine import Decided
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.dialects.decisions.questions import (
    LONGEST_NAME,
    STRING,
    TEXT,
    WORDS,
    DecisionBody,
    DecisionCall,
    DecisionDialect,
    Described,
    Loc,
    Part,
    Text,
    check_count,
    checked,
    describe,
    figures,
    named,
    no_images,
    read_question,
    reader,
    request_of,
    sized,
    text_of,
    typed_schema,
)
from sfumato.server.http.errors import ApiError, ErrorForm, refusal
from sfumato.server.http.middleware import KeyRefused
from sfumato.server.schemas import NULL, First, Schema, at_most, closed, either
from sfumato.server.service import Service

DESCRIBED = either(*TEXT["anyOf"], NULL)


def _questions_schema(noul_criteria: Schema, instructions: Schema) -> Schema:
    instructed = {"instructions": instructions}
    options = sized({"type": "object", "additionalProperties": DESCRIBED}, MOST_OPTIONS)
    levels = sized({"type": "array", "items": TEXT}, MOST_LEVELS)
    kinds = (
        typed_schema("noul", {}, instructed | {"criteria": either(noul_criteria, NULL)}),
        typed_schema("choice", {"criteria": options}, instructed),
        typed_schema("score", {"criteria": levels}, instructed),
    )
    names = {"minLength": 1, "maxLength": LONGEST_NAME}
    entries = {"type": "object", "propertyNames": names, "additionalProperties": either(*kinds)}
    return sized(entries, MOST_QUESTIONS)


class NoulCriteria(Part):
    """Descriptions of yes and of no."""

    true: Described = None
    false: Described = None


class NoulQuestion(Part):
    type: Literal["noul"]
    instructions: Described = None
    criteria: NoulCriteria | None = None


class ChoiceQuestion(Part):
    type: Literal["choice"]
    instructions: Described = None
    criteria: Annotated[dict[str, Described], at_most(MOST_OPTIONS), Field(min_length=1)]


class ScoreQuestion(Part):
    type: Literal["score"]
    instructions: Described = None
    criteria: Annotated[list[Text], First, Field(min_length=1, max_length=MOST_LEVELS)]


Typed = NoulQuestion | ChoiceQuestion | ScoreQuestion
TYPES = ("noul", "choice", "score")


def _read(
    service: Service,
    given: Any,
    read: Callable[..., Typed],
    text: Callable[[Any, Loc], str],
    is_tagged: bool = False,
) -> tuple[dict[str, Typed], dict[str, ask.Question]]:
    """The questions of a map as they were read, and as the engine gets them. text: of what is in
    the place of instructions; is_tagged: whether places have a question's type. Raises Refused."""
    if not isinstance(given, dict):
        raise refusal(("questions",), "must be an object: id → question", "dict_type")
    check_count(len(given))
    typed: dict[str, Typed] = {}
    questions: dict[str, ask.Question] = {}
    for name, value in given.items():
        loc: Loc = ("questions", name)
        if not 1 <= len(name) <= LONGEST_NAME:
            wrong = f"an id has 1 to {LONGEST_NAME} characters, and not {len(name):,}"
            raise refusal(loc, wrong, "string_length", "questions")
        one = read_question(read, value, loc, TYPES, service.settings.lenient)
        loc = (*loc, one.type) if is_tagged else loc
        typed[name], questions[name] = one, checked(_question(one, text, loc), loc)
    return typed, questions


def _question(typed: Typed, text: Callable[[Any, Loc], str], loc: Loc) -> ask.Question:
    """loc: where the question stands. Raises Refused."""
    instructions = text(typed.instructions, (*loc, "instructions"))
    loc = (*loc, "criteria")
    if isinstance(typed, NoulQuestion):
        described = typed.criteria or NoulCriteria()
        yes, no = (text_of(value, (*loc, name)) for name, value in described)
        return ask.YesNoQuestion(instructions, yes, no)
    if isinstance(typed, ChoiceQuestion):
        criteria = typed.criteria.items()
        options = tuple(ask.Option(name, text_of(it, (*loc, name))) for name, it in criteria)
        return ask.ChoiceQuestion(instructions, options)
    levels = tuple(text_of(level, (*loc, number)) for number, level in enumerate(typed.criteria))
    return ask.ScoreQuestion(instructions, levels)


def _answer(typed: Typed, answer: Answer, shown: Callable[[Any], Any]) -> dict[str, Any]:
    """shown: a level of a score as the caller reads it."""
    if isinstance(typed, NoulQuestion):
        assert isinstance(answer, YesNoAnswer)
        return {"type": "noul", "noul": answer.probability, **figures(answer)}
    if isinstance(typed, ChoiceQuestion):
        assert isinstance(answer, ChoiceAnswer)
        names = list(typed.criteria)
        own: dict[str, Any] = {
            "type": "choice",
            "choice": names[answer.best],
            "probabilities": dict(zip(names, answer.probabilities, strict=True)),
        }
    else:
        assert isinstance(answer, ScoreAnswer)
        own = {
            "type": "score",
            "score": answer.score,
            "legend": {str(number): shown(level) for number, level in enumerate(typed.criteria)},
            "probabilities": {str(n): p for n, p in enumerate(answer.probabilities)},
        }
    return {**own, "confidence": answer.confidence, **figures(answer)}


# System One.

_SYSTEM_ONE_QUESTIONS = _questions_schema(
    closed({}, {"true": DESCRIBED, "false": DESCRIBED}), DESCRIBED
)


class SystemOneBody(DecisionBody):
    model: str | None = Field(
        None, description="At /v1/systemone: jev-latest, any other jev- name, or the model's own."
    )
    state: Text = Field(description="What all questions are about.")
    questions: Annotated[Any, WithJsonSchema(_SYSTEM_ONE_QUESTIONS)] = Field(
        description="Id → question. Ids come back as they are, and never reach the model."
    )
    assets: Annotated[Any, WithJsonSchema(schemas.NULL)] = Field(
        None, description="Refused unless null: images are not supported yet."
    )


_read_system_one: Callable[..., Typed] = reader(Typed)
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
_SYSTEM_ONE_ERROR = {
    "type": "object",
    "properties": {"detail": {"anyOf": [{"type": "array", "items": _WRONG}, _OTHER]}},
    "required": ["detail"],
}


def parse(service: Service, endpoint: str, body: SystemOneBody) -> DecisionCall:
    """Raises Refused."""
    if endpoint == PATH:
        _check_model(service, body.model)
    if body.assets is not None:
        raise no_images("assets")
    state = text_of(body.state, ("state",))
    typed, questions = _read(service, body.questions, _read_system_one, text_of, is_tagged=True)
    request = request_of(body, endpoint, state, questions)
    return DecisionCall(request, partial(_system_one_body, service.name, typed))


def _check_model(service: Service, name: str | None) -> None:
    """Refuses other models, as System One does, and unlike OpenAI's routes: a client of several
    servers names the model that it means. Perplexity's client, with names of its own, posts to
    /v1/decisions. Raises Refused."""
    served = (service.name, *service.settings.aliases)
    if name is None or name in served or service.settings.lenient or name.startswith(_JEV):
        return
    raise Refused(
        "model",
        f"{name[:200]!r} is not served here",
        f"send jev-latest or {service.name!r}, or start the server with --alias or --lenient",
        code="model_not_found",
    )


def _system_one_body(model: str, typed: Mapping[str, Typed], decided: Decided) -> Mapping[str, Any]:
    usage, answers = decided.usage, decided.answers
    return {
        "model": model,
        "answers": {n: _answer(one, answers[n], lambda level: level) for n, one in typed.items()},
        "usage": {
            "input_tokens": usage.input_tokens,
            "output_tokens": len(typed),
            "x_cached_tokens": usage.cached_tokens,
            "x_reads": usage.reads,
        },
    }


def _system_one_status(error: ApiError) -> int:
    if isinstance(error, KeyRefused) and error.missing:
        return 403
    if error.code == "context_length_exceeded":
        return 413
    if error.code in ("bodies_busy", "memory"):
        return OVERLOADED
    return 422 if error.status == 400 and error.field else error.status


def _system_one_error(error: ApiError) -> dict[str, Any]:
    status = _system_one_status(error)
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
        _system_one_error,
        _system_one_status,
        "SystemOneError",
        _SYSTEM_ONE_ERROR,
        request_id="x-typesafe-request-id",
        statuses=(422, 529),
    ),
)

# Gemini.

_GEMINI_TEXT = closed({"type": {"const": "text"}, "text": WORDS}, {"annotations": {}})
_GEMINI_INPUT = either(STRING, _GEMINI_TEXT, {"type": "array", "items": _GEMINI_TEXT})
_GEMINI_QUESTIONS = _questions_schema(
    closed({}, dict.fromkeys(("true_description", "false_description"), either(STRING, NULL))),
    either(*_GEMINI_INPUT["anyOf"], NULL),
)


class GeminiDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(_GEMINI_INPUT)] = Field(
        description="Text, or parts of text."
    )
    questions: Annotated[Any, WithJsonSchema(_GEMINI_QUESTIONS)] = Field(
        description="Id → question."
    )


class GeminiCriteria(Part):
    true_description: str | None = None
    false_description: str | None = None


class GeminiNoulQuestion(NoulQuestion):
    criteria: GeminiCriteria | None = None  # type: ignore[assignment]


_read_gemini: Callable[..., Typed] = reader(GeminiNoulQuestion | ChoiceQuestion | ScoreQuestion)
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


def _parse_gemini(service: Service, endpoint: str, body: GeminiDecisionBody) -> DecisionCall:
    """Raises Refused."""
    state = _parts_text(body.input, ("input",))
    typed, questions = _read(service, body.questions, _read_gemini, _instructions)
    request = request_of(body, endpoint, state, questions)
    return DecisionCall(request, partial(_gemini_body, typed))


def _instructions(given: Any, loc: Loc) -> str:
    return "" if given is None else _parts_text(given, loc)


def _parts_text(given: Any, loc: Loc) -> str:
    """A text, a part, or parts, as one text with a line each. Raises Refused."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return "\n".join(_parts_text(part, (*loc, at)) for at, part in enumerate(given))
    if not isinstance(given, dict):
        wrong = f"must be text or parts, and not {describe(given)}"
        raise refusal(loc, wrong, "string_type")
    if given.get("type") in _MEDIA:
        raise no_images(named(loc))
    text = given.get("text")
    if given.get("type") != "text" or not isinstance(text, str):
        raise refusal(loc, "must be a part with a type and a text", "literal_error")
    return text


def _gemini_body(typed: Mapping[str, Typed], decided: Decided) -> Mapping[str, Any]:
    usage = decided.usage
    answers = {
        name: _answer(one, answer, lambda level: text_of(level, ()))
        | {"confidence": max(answer.probabilities)}
        for (name, one), answer in zip(typed.items(), decided.answers.values(), strict=True)
    }
    return {
        "answers": answers,
        "usage": {
            "total_input_tokens": usage.input_tokens,
            "total_cached_tokens": usage.cached_tokens,
            "total_output_tokens": 0,
            "total_thought_tokens": 0,
            "total_tokens": usage.input_tokens,
            "x_reads": usage.reads,
        },
    }


def _gemini_error(error: ApiError) -> dict[str, Any]:
    """Google's form."""
    word = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "status": word}}


_GEMINI_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "status": {"type": "string"},
            },
            "required": ["code", "message", "status"],
        }
    },
    "required": ["error"],
}
GEMINI_DECISIONS = DecisionDialect(
    body_type=GeminiDecisionBody,
    parse=_parse_gemini,
    errors=ErrorForm(_gemini_error, name="GeminiError", schema=_GEMINI_ERROR),
    state="input",
)
