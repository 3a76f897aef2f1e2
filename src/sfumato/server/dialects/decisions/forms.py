"""The forms of typed decisions: System One's (TypeSafe's Jev), Gemini's and OpenAI's; and their
routes.

System One has an object of questions about a state. Gemini's state is an input of typed parts, and
its confidence is the probability of the winner, of yes/no questions too. OpenAI has a list of
questions about an input: a text is the state as it is, and so is the text of a single message of a
user. Any other input is its items as JSON text, one a line, since no text of a message can imitate
the next line's quotes. Ids of calls do not reach the model: the outputs of functions carry the
names of their functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi.datastructures import Headers
from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints import questions as ask
from sfumato.diffusion.constraints.questions import (
    MOST_LEVELS,
    MOST_OPTIONS,
    MOST_QUESTIONS,
    Answer,
    ChoiceAnswer,
    ScoreAnswer,
)
from sfumato.media.part import PictureSource
from sfumato.refused import Refused
from sfumato.server.chat import pictures
from sfumato.server.dialects.decisions import (
    LONGEST_NAME,
    STRING,
    TEXT,
    WORDS,
    DecisionBody,
    DecisionDialect,
    DecisionRoute,
    Described,
    Loc,
    Part,
    Pictures,
    Text,
    describe,
    figures,
    named,
    no_images,
    of_kind,
    reader,
    sized,
    text_of,
    typed_schema,
)
from sfumato.server.http.errors import ApiError, ErrorForm, refusal
from sfumato.server.http.middleware import KeyRefused
from sfumato.server.schemas import (
    NULL,
    First,
    Schema,
    at_most,
    closed,
    either,
    list_of,
    without_effect,
)
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


def _question(typed: Typed, loc: Loc, text: Callable[[Any, Loc], str] = text_of) -> ask.Question:
    """text: of what is in the place of instructions. Raises Refused."""
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


def _answer(
    typed: Typed, answer: Answer, shown: Callable[[Any], Any] = lambda level: level
) -> dict[str, Any]:
    """shown: a level of a score as the caller reads it."""
    likely, values = answer.probabilities, list[Any](range(len(answer.probabilities)))
    match typed, answer:
        case ChoiceQuestion(criteria=names), ChoiceAnswer(best=best, confidence=confidence):
            values = list(names)
            own = {
                "choice": values[best],
                "probabilities": dict(zip(names, likely, strict=True)),
                "confidence": confidence,
            }
        case ScoreQuestion(criteria=levels), ScoreAnswer(score=score, confidence=confidence):
            own = {
                "score": score,
                "legend": {str(number): shown(level) for number, level in enumerate(levels)},
                "probabilities": {str(n): p for n, p in enumerate(likely)},
                "confidence": confidence,
            }
        case _:
            values, own = [True, False], {"noul": likely[0]}
    return {"type": typed.type, **own, **figures(answer, values)}


# System One.

_SYSTEM_ONE_QUESTIONS = _questions_schema(
    closed({}, {"true": DESCRIBED, "false": DESCRIBED}), DESCRIBED
)

_ASSETS = sized(
    {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": LONGEST_NAME},
        "additionalProperties": closed(
            {"data_base64": STRING},
            {"type": {"const": "image"}, "format": either(STRING, NULL)},
        ),
    },
    MOST_QUESTIONS,
)


class SystemOneBody(DecisionBody):
    model: str | None = Field(
        None, description="At /v1/systemone: jev-latest, any other jev- name, or the model's own."
    )
    state: Text = Field(description="What all questions are about.")
    questions: Annotated[Any, WithJsonSchema(_SYSTEM_ONE_QUESTIONS)] = Field(
        description="Id → question. Ids come back as they are, and never reach the model."
    )
    assets: Annotated[Any, WithJsonSchema(either(_ASSETS, NULL))] = Field(
        None, description="Placeholder → picture, which stands where a text of the state has it."
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


def _state(body: SystemOneBody, shown: Pictures) -> str:
    """Raises Refused."""
    if body.assets is None:
        return text_of(body.state, ("state",))
    if not (assets := _assets(body)):
        raise refusal(("assets",), "must have a picture", "too_short")
    pictures.check(shown.service, list(assets.values()))
    longest_first = sorted(assets, key=len, reverse=True)
    names = re.compile("|".join(map(re.escape, longest_first)))
    placed = set[str]()

    def mark(match: re.Match[str]) -> str:
        placed.add(match[0])
        return shown.mark(assets[match[0]])

    text = text_of(_changed(body.state, lambda text: names.sub(mark, text)), ("state",))
    for name in assets:
        if name not in placed:
            raise refusal(("assets", name), "stands nowhere in the state", "value_error")
    for name, question in body.questions.items() if isinstance(body.questions, dict) else ():

        def check(text: str, where: Loc = ("questions", name)) -> str:
            if names.search(text):
                raise no_images(named(where))
            return text

        _changed(question, check)
    return text


def _assets(body: SystemOneBody) -> dict[str, PictureSource]:
    """The pictures by their placeholders. Raises Refused."""
    if not isinstance(body.assets, dict):
        raise refusal(("assets",), "must be an object: placeholder → picture", "dict_type")
    made = {}
    for name, asset in body.assets.items():
        loc: Loc = ("assets", name)
        if not 1 <= len(name) <= LONGEST_NAME:
            wrong = f"a placeholder has 1 to {LONGEST_NAME} characters, and not {len(name):,}"
            raise refusal(loc, wrong, "string_length", "assets")
        if not isinstance(asset, dict) or asset.get("type", "image") != "image":
            raise refusal(loc, "must be an object of the type image", "value_error")
        where, part = f"assets.{name}", asset.get("part")
        if part is None:
            made[name] = pictures.of_base64(asset.get("data_base64"), f"{where}.data_base64")
        elif isinstance(part, str) and part in body._files:
            made[name] = PictureSource(body._files[part], f"{where}.part")
        else:
            raise refusal((*loc, "part"), "names no part of this request", "value_error")
    return made


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """JSON data with all texts changed, the keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list) else value


def _check_model(service: Service, endpoint: str, body: SystemOneBody) -> None:
    """Refuses other models, as System One does, and unlike OpenAI's routes: a client of several
    servers names the model that it means. Perplexity's client, with names of its own, posts to
    /v1/decisions. Raises Refused."""
    name, served = body.model, service.served_names
    is_any = endpoint != PATH or service.settings.lenient
    if is_any or name is None or name in served or name.startswith(_JEV):
        return
    raise Refused(
        "model",
        f"{name[:200]!r} is not served here",
        f"send jev-latest or {service.name!r}, or start the server with --alias or --lenient",
        code="model_not_found",
    )


def _system_one_status(error: ApiError) -> int:
    if isinstance(error, KeyRefused) and error.missing:
        return 403
    if error.code == "context_length_exceeded":
        return 413
    if error.code in ("bodies_busy", "memory", "queue_full"):
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
    check=_check_model,
    state_of=_state,
    read=_read_system_one,
    types=TYPES,
    question_of=_question,
    answered=_answer,
    usage=lambda usage, count: {
        "input_tokens": usage.input_tokens,
        "output_tokens": count,
        "x_cached_tokens": usage.cached_tokens,
        "x_reads": usage.reads,
    },
    tagged=True,
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
_RESOLUTIONS = {"low": 70, "medium": 280, "high": 560, "ultra_high": 1120}
_GEMINI_IMAGE = either(
    *(
        closed(
            {"type": {"const": "image"}, given: STRING},
            {
                "mime_type": either(STRING, NULL),
                "resolution": {"enum": [*_RESOLUTIONS, None]},
            },
        )
        for given in ("data", "uri")
    )
)


def _gemini_input(part: Schema) -> Schema:
    return either(STRING, part, {"type": "array", "items": part})


_GEMINI_INPUT = _gemini_input(_GEMINI_TEXT)
_GEMINI_QUESTIONS = _questions_schema(
    closed({}, dict.fromkeys(("true_description", "false_description"), either(STRING, NULL))),
    either(*_GEMINI_INPUT["anyOf"], NULL),
)


class GeminiDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(_gemini_input(either(_GEMINI_TEXT, _GEMINI_IMAGE)))] = (
        Field(description="Text, or parts: texts and pictures.")
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
_MEDIA = ("document", "audio", "video")
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _parts_text(given: Any, loc: Loc, shown: Pictures | None = None) -> str:
    """A text, a part, or parts, as one text with a line each. shown: None where no picture may be.
    Raises Refused."""
    if isinstance(given, str | None):
        return given or ""
    if isinstance(given, list):
        return "\n".join(_parts_text(part, (*loc, at), shown) for at, part in enumerate(given))
    if not isinstance(given, dict):
        wrong = f"must be text or parts, and not {describe(given)}"
        raise refusal(loc, wrong, "string_type")
    if given.get("type") == "image":
        if shown is None:
            raise no_images(named(loc))
        return shown.mark(_gemini_source(given, loc))
    if given.get("type") in _MEDIA:
        raise refusal((*loc, "type"), "only texts and images are read", "value_error")
    text = given.get("text")
    if given.get("type") != "text" or not isinstance(text, str):
        raise refusal(loc, "must be a part with a type and a text", "literal_error")
    return text


def _gemini_source(part: Mapping[str, Any], loc: Loc) -> PictureSource:
    """Raises Refused."""
    where, resolution = named(loc), part.get("resolution")
    if not isinstance(resolution, str | None) or resolution not in (None, *_RESOLUTIONS):
        wrong = f"must be one of {', '.join(_RESOLUTIONS)}"
        raise refusal((*loc, "resolution"), wrong, "literal_error")
    if isinstance(uri := part.get("uri"), str) and part.get("data") is None:
        source = PictureSource(uri, f"{where}.uri")
    else:
        source = pictures.of_base64(part.get("data"), f"{where}.data")
    return replace(source, tokens=_RESOLUTIONS.get(resolution or ""))


def _gemini_answer(typed: Typed, answer: Answer) -> dict[str, Any]:
    own = _answer(typed, answer, lambda level: text_of(level, ()))
    return own | {"confidence": max(answer.probabilities)}


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
    state_of=lambda body, shown: _parts_text(body.input, ("input",), shown),
    read=_read_gemini,
    types=TYPES,
    question_of=lambda typed, loc: _question(typed, loc, _parts_text),
    answered=_gemini_answer,
    usage=lambda usage, count: {
        "total_input_tokens": usage.input_tokens,
        "total_cached_tokens": usage.cached_tokens,
        "total_output_tokens": 0,
        "total_thought_tokens": 0,
        "total_tokens": usage.input_tokens,
        "x_reads": usage.reads,
    },
    errors=ErrorForm(_gemini_error, name="GeminiError", schema=_GEMINI_ERROR),
    state="input",
    names_model=False,
)

# OpenAI.


def _open(kind: str, fields: dict[str, Schema]) -> Schema:
    """An item of OpenAI's input, or a part of one: unknown fields are ignored."""
    return typed_schema(kind, fields, {}) | {"additionalProperties": True}


def _message(role: Schema, content: Schema) -> Schema:
    """An item that may lack its type."""
    fields = closed({"role": role, "content": content}, {"type": {"const": "message"}})
    return fields | {"additionalProperties": True}


_JSON = {"data": either({"type": "object"}, {"type": "array"})}
_OPENAI_TEXT = either(
    WORDS,
    list_of(either(_open("input_text", {"text": WORDS}), _open("input_json", _JSON)), least=1),
)
_OPENAI_SHOWN = either(
    WORDS,
    list_of(
        either(
            _open("input_text", {"text": WORDS}),
            _open("input_json", _JSON),
            _open("input_image", {"image_url": STRING}),
        ),
        least=1,
    ),
)
_OUTPUT = either(STRING, list_of(_open("output_text", {"text": STRING}), least=1))
_CALL = {"call_id": STRING, "name": STRING, "arguments": STRING}
OPENAI_INPUT = either(
    STRING,
    list_of(
        either(
            _message({"const": "user"}, _OPENAI_SHOWN),
            _message({"enum": ["system", "developer"]}, _OPENAI_TEXT),
            _message({"const": "assistant"}, _OUTPUT),
            _open("function_call", _CALL),
        ),
        least=1,
    ),
)

_NAMED: Schema = {"name": either(STRING | {"maxLength": LONGEST_NAME}, NULL)}

_DESCRIPTION: Schema = {"description": either(STRING, NULL)}

_OPTION = closed({"value": either(STRING, {"type": "boolean"})}, _DESCRIPTION)

_LEVEL = closed({"label": STRING}, _DESCRIPTION)

_OPTIONS = sized({"type": "array", "items": _OPTION, "uniqueItems": True}, MOST_OPTIONS)
_LEVELS = sized({"type": "array", "items": _LEVEL}, MOST_LEVELS)
_INSTRUCTED: Schema = {"instructions": _OPENAI_TEXT}

OPENAI_QUESTIONS = sized(
    {
        "type": "array",
        "items": either(
            typed_schema("predicate", _INSTRUCTED, _NAMED),
            typed_schema("choice", {**_INSTRUCTED, "choices": _OPTIONS}, _NAMED),
            typed_schema("score", {**_INSTRUCTED, "levels": _LEVELS}, _NAMED),
        ),
    },
    MOST_QUESTIONS,
)


@without_effect("prompt_cache_key prompt_cache_options safety_identifier")
class OpenAIDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(OPENAI_INPUT)] = Field(
        description="Text, or messages and calls of functions with their outputs, and pictures."
    )
    questions: Annotated[Any, WithJsonSchema(OPENAI_QUESTIONS)] = Field(
        description="predicate, choice and score questions; answers come in the same order."
    )


class OpenAIPredicate(Part):
    type: Literal["predicate"]
    name: str | None = Field(None, max_length=LONGEST_NAME)
    instructions: Any


class OpenAIOption(Part):
    value: Annotated[Any, of_kind(str, bool, name="text, true or false")]
    description: str | None = None


class OpenAIChoice(OpenAIPredicate):
    type: Literal["choice"]  # type: ignore[assignment]
    choices: Annotated[list[OpenAIOption], First, Field(min_length=1, max_length=MOST_OPTIONS)]


class OpenAILevel(Part):
    label: str
    description: str | None = None


class OpenAIScore(OpenAIPredicate):
    type: Literal["score"]  # type: ignore[assignment]
    levels: Annotated[list[OpenAILevel], First, Field(min_length=1, max_length=MOST_LEVELS)]


read_openai: Callable[..., OpenAIPredicate | OpenAIChoice | OpenAIScore] = reader(
    OpenAIPredicate | OpenAIChoice | OpenAIScore
)
"""Validate one question; raise pydantic's ValidationError."""

_ROLES = ("user", "system", "developer", "assistant")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}

OpenAITyped = OpenAIPredicate | OpenAIChoice | OpenAIScore


def _openai_question(typed: OpenAITyped, loc: Loc) -> ask.Question:
    instructions = _content(typed.instructions, (*loc, "instructions"))
    if isinstance(typed, OpenAIChoice):
        names = option_names([option.value for option in typed.choices])
        options = [
            ask.Option(name, option.description or "")
            for name, option in zip(names, typed.choices, strict=True)
        ]
        return ask.ChoiceQuestion(instructions, tuple(options))
    if isinstance(typed, OpenAIScore):
        levels = [
            f"{level.label} ({level.description})" if level.description else level.label
            for level in typed.levels
        ]
        return ask.ScoreQuestion(instructions, tuple(levels))
    return ask.YesNoQuestion(instructions)


def option_names(values: Sequence[str | bool]) -> list[str]:
    """The names of choices: a boolean is its JSON text, and says so where a text is the same."""
    texts = {value for value in values if isinstance(value, str)}
    names = []
    for value in values:
        name = value if isinstance(value, str) else json.dumps(value)
        while not isinstance(value, str) and name in texts:
            name += " (boolean)"
        names.append(name)
    return names


def _input(given: Any, shown: Pictures) -> str:
    """The state's text. Raises Refused."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise refusal(("input",), "must be text or a list of messages", "list_type")
    calls: dict[str, str] = {}  # id → name
    items = [_item(item, ("input", number), calls, shown) for number, item in enumerate(given)]
    if len(items) == 1 and items[0].get("role") == "user":
        return str(items[0]["content"])
    return "\n".join(text_of(item, ("input", number)) for number, item in enumerate(items))


def _item(item: Any, loc: Loc, calls: dict[str, str], shown: Pictures) -> dict[str, Any]:
    """One item of the input as the model reads it. Raises Refused."""
    if not isinstance(item, dict):
        raise refusal(loc, f"must be an object, and not {describe(item)}", "dict_type")
    kind = item.get("type", "message")
    kind = kind if isinstance(kind, str) else ""
    if kind in _CALLS:
        name, call = _string(item, "name", loc), _string(item, "call_id", loc)
        calls[call] = name
        return {"type": kind, "name": name, _CALLS[kind]: _string(item, _CALLS[kind], loc)}
    if kind in [f"{call}_output" for call in _CALLS]:
        call = _string(item, "call_id", loc)
        if call not in calls:
            raise refusal((*loc, "call_id"), "answers no call before it", "value_error")
        output = _content(item.get("output"), (*loc, "output"), shown)
        return {"type": kind, "name": calls[call], "output": output}
    if kind != "message":
        kinds = ("message", *_CALLS, *(f"{call}_output" for call in _CALLS))
        raise refusal((*loc, "type"), f"must be one of {', '.join(kinds)}", "literal_error")
    role = item.get("role")
    if role not in _ROLES:
        raise refusal((*loc, "role"), f"must be one of {', '.join(_ROLES)}", "literal_error")
    seen = shown if role == "user" else None
    return {"role": role, "content": _content(item.get("content"), (*loc, "content"), seen)}


def _string(item: Mapping[str, Any], field: str, loc: Loc) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise refusal((*loc, field), f"must be text, and not {describe(value)}", "string_type")
    return value


def _content(content: Any, loc: Loc, shown: Pictures | None = None) -> str:
    """A text, or parts as one text, with a line each. shown: None where no picture may be. Raises
    Refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        text = f"must be text or a list of parts, and not {describe(content)}"
        raise refusal(loc, text, "string_type")
    return "\n".join(_part(part, (*loc, number), shown) for number, part in enumerate(content))


def _part(part: Any, loc: Loc, shown: Pictures | None) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        if shown is None:
            raise no_images(named(loc))
        return shown.mark(pictures.of_url(part, named(loc)))
    if kind == "input_json":
        if not isinstance(part.get("data"), dict | list):
            raise refusal((*loc, "data"), "must be an object or a list", "dict_type")
        return text_of(part["data"], (*loc, "data"))
    if not isinstance(kind, str) or kind not in _TEXTS:
        kinds = ", ".join((*_TEXTS, "input_json"))
        raise refusal((*loc, "type"), f"must be one of {kinds}", "literal_error")
    return _string(part, _TEXTS[kind], loc)


def _openai_answer(typed: OpenAITyped, answer: Answer) -> dict[str, Any]:
    likely, values = answer.probabilities, list[Any](range(len(answer.probabilities)))
    match typed, answer:
        case OpenAIChoice(choices=choices), ChoiceAnswer(best=best, confidence=confidence):
            values = [one.value for one in choices]
            pairs = zip(values, likely, strict=True)
            own = {
                "choice": values[best],
                "probabilities": [{"value": value, "probability": p} for value, p in pairs],
                "confidence": confidence,
            }
        case OpenAIScore(levels=levels), ScoreAnswer(score=score, confidence=confidence):
            own = {
                "score": score,
                "probabilities": [
                    {"value": number, "label": level.label, "probability": p}
                    for number, (level, p) in enumerate(zip(levels, likely, strict=True))
                ],
                "confidence": confidence,
            }
        case _:
            values, own = [True, False], {"probability": likely[0]}
    return {"type": typed.type, "name": typed.name, **own, **figures(answer, values)}


OPENAI_DECISIONS = DecisionDialect(
    body_type=OpenAIDecisionBody,
    state_of=lambda body, shown: _input(body.input, shown),
    read=read_openai,
    types=("predicate", "choice", "score"),
    question_of=_openai_question,
    answered=_openai_answer,
    usage=lambda usage, count: {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens,
        "x_reads": usage.reads,
    },
    state="input",
    listed=True,
)

_FORMS = (
    "state with questions as an object (System One), input with questions as a list (OpenAI), or "
    f"input with questions as an object and the header {KEY_HEADER} (Gemini)"
)


def _by_headers(headers: Headers) -> DecisionDialect[Any, Any]:
    """The form of errors of a body that cannot be read."""
    return GEMINI_DECISIONS if KEY_HEADER in headers else OPENAI_DECISIONS


def _by_body(headers: Headers, body: Mapping[str, Any]) -> DecisionDialect[Any, Any]:
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
        help="System One: questions about a state, answered with probabilities.",
        dialects=(SYSTEM_ONE,),
        by_headers=lambda headers: SYSTEM_ONE,
        by_body=lambda headers, body: SYSTEM_ONE,
    ),
    DecisionRoute(
        name="decisions",
        path="/v1/decisions",
        help=f"Questions answered with probabilities: {_FORMS}.",
        dialects=(OPENAI_DECISIONS, SYSTEM_ONE, GEMINI_DECISIONS),
        by_headers=_by_headers,
        by_body=_by_body,
    ),
)
