"""OpenAI's decisions: a list of questions about an input.

A text is the state as it is, and so is the text of a single message of a user. Any other input is
its items as JSON text, one a line, since no text of a message can imitate the next line's quotes.
Ids of calls do not reach the model: the outputs of functions carry the names of their functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    WithJsonSchema,
)

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
from sfumato.server.dialects.decisions.questions import (
    LONGEST_NAME,
    STRING,
    WORDS,
    DecisionBody,
    DecisionCall,
    DecisionDialect,
    Loc,
    Part,
    check_count,
    checked,
    describe,
    figures,
    named,
    no_images,
    of_kind,
    read_question,
    reader,
    request_of,
    sized,
    text_of,
    typed_schema,
)
from sfumato.server.http.errors import refusal
from sfumato.server.schemas import NULL, First, Schema, closed, either, list_of, without_effect
from sfumato.server.service import Service


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
_OUTPUT = either(STRING, list_of(_open("output_text", {"text": STRING}), least=1))
_CALL = {"call_id": STRING, "name": STRING, "arguments": STRING}
OPENAI_INPUT = either(
    STRING,
    list_of(
        either(
            _message({"enum": ["user", "system", "developer"]}, _OPENAI_TEXT),
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
        description="Text, or messages and calls of functions with their outputs."
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

TYPES = ("predicate", "choice", "score")
_ROLES = ("user", "system", "developer", "assistant")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}

Typed = OpenAIPredicate | OpenAIChoice | OpenAIScore


def parse(service: Service, endpoint: str, body: OpenAIDecisionBody) -> DecisionCall:
    """Raises Refused."""

    state = state_of(body.input)
    if not isinstance(body.questions, list):
        raise refusal(("questions",), "must be a list of questions", "list_type")
    check_count(len(body.questions))
    typed: list[Typed] = []
    questions: dict[str, ask.Question] = {}
    for number, value in enumerate(body.questions):
        loc = ("questions", number)
        one = read_question(read_openai, value, loc, TYPES, service.settings.lenient)
        typed.append(one)
        questions[str(number)] = checked(_question(one, loc), loc)
    request = request_of(body, endpoint, state, questions)
    return DecisionCall(request, partial(_body, service.name, typed))


def _question(typed: Typed, loc: Loc) -> ask.Question:
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


def state_of(given: Any) -> str:
    """The state's text. Raises Refused."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise refusal(("input",), "must be text or a list of messages", "list_type")
    calls: dict[str, str] = {}  # id → name
    items = [_item(item, ("input", number), calls) for number, item in enumerate(given)]
    if len(items) == 1 and items[0].get("role") == "user":
        return str(items[0]["content"])
    return "\n".join(text_of(item, ("input", number)) for number, item in enumerate(items))


def _item(item: Any, loc: Loc, calls: dict[str, str]) -> dict[str, Any]:
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
        output = _content(item.get("output"), (*loc, "output"))
        return {"type": kind, "name": calls[call], "output": output}
    if kind != "message":
        kinds = ("message", *_CALLS, *(f"{call}_output" for call in _CALLS))
        raise refusal((*loc, "type"), f"must be one of {', '.join(kinds)}", "literal_error")
    role = item.get("role")
    if role not in _ROLES:
        raise refusal((*loc, "role"), f"must be one of {', '.join(_ROLES)}", "literal_error")
    return {"role": role, "content": _content(item.get("content"), (*loc, "content"))}


def _string(item: Mapping[str, Any], field: str, loc: Loc) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise refusal((*loc, field), f"must be text, and not {describe(value)}", "string_type")
    return value


def _content(content: Any, loc: Loc) -> str:
    """A text, or parts as one text, with a line each. Raises Refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        text = f"must be text or a list of parts, and not {describe(content)}"
        raise refusal(loc, text, "string_type")
    return "\n".join(_part(part, (*loc, number)) for number, part in enumerate(content))


def _part(part: Any, loc: Loc) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        raise no_images(named(loc))
    if kind == "input_json":
        if not isinstance(part.get("data"), dict | list):
            raise refusal((*loc, "data"), "must be an object or a list", "dict_type")
        return text_of(part["data"], (*loc, "data"))
    if not isinstance(kind, str) or kind not in _TEXTS:
        kinds = ", ".join((*_TEXTS, "input_json"))
        raise refusal((*loc, "type"), f"must be one of {kinds}", "literal_error")
    return _string(part, _TEXTS[kind], loc)


def _body(model: str, typed: Sequence[Typed], decided: Decided) -> Mapping[str, Any]:
    usage = decided.usage
    return {
        "model": model,
        "answers": [_answer(one, decided.answers[str(number)]) for number, one in enumerate(typed)],
        "usage": {
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
    }


def _answer(typed: Typed, answer: Answer) -> dict[str, Any]:
    head: dict[str, Any] = {"type": typed.type, "name": typed.name}
    likely = answer.probabilities
    if isinstance(typed, OpenAIChoice):
        assert isinstance(answer, ChoiceAnswer)
        values = [option.value for option in typed.choices]
        head["choice"] = values[answer.best]
        head["probabilities"] = [
            {"value": value, "probability": p} for value, p in zip(values, likely, strict=True)
        ]
        head["confidence"] = answer.confidence
    elif isinstance(typed, OpenAIScore):
        assert isinstance(answer, ScoreAnswer)
        head["score"] = answer.score
        head["probabilities"] = [
            {"value": number, "label": level.label, "probability": p}
            for number, (level, p) in enumerate(zip(typed.levels, likely, strict=True))
        ]
        head["confidence"] = answer.confidence
    else:
        assert isinstance(answer, YesNoAnswer)
        head["probability"] = answer.probability
    return head | figures(answer)


OPENAI_DECISIONS = DecisionDialect(
    body_type=OpenAIDecisionBody, parse=parse, state="input", listed=True
)
