"""JSON schemas of the bodies of typed decisions, for the API description.

Bodies that they allow are accepted, but for the rules in openapi.py. Knows no answers.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from sfumato.diffusion.constraints.questions import (
    MOST_LEVELS,
    MOST_OPTIONS,
    MOST_QUESTIONS,
)
from sfumato.options.limits import MOST_READS
from sfumato.server.schemas.json_schemas import NULL, Schema, either
from sfumato.server.schemas.shapes import closed

LONGEST_NAME = 1024  # characters of a question's id or name
_STRING: Schema = {"type": "string"}
TEXT = either(_STRING, {"type": "object"}, {"type": "array"})
_DESCRIBED = either(*TEXT["anyOf"], NULL)
SAMPLES = either({"type": "integer", "minimum": 1, "maximum": MOST_READS}, {"enum": ["auto", None]})


def check_samples(value: Any) -> int | str | None:
    """Raises PydanticCustomError, with no path of a union's branches."""
    if value is None or value == "auto":
        return value
    if isinstance(value, float) and value.is_integer():
        text = f"whole numbers are written without a decimal point, and not as {value!r}"
        raise PydanticCustomError("int_type", text)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not (is_count and 1 <= value <= MOST_READS):
        raise PydanticCustomError(
            "samples", f"must be a whole number from 1 to {MOST_READS}, or auto"
        )
    return value


def with_any_field(schema: Schema) -> None:
    """Completes the schema of a body whose unknown fields are ignored."""
    schema["additionalProperties"] = True


def _sized(schema: Schema, most: int) -> Schema:
    """An object or a list of 1 to `most` entries."""
    what = "Items" if schema["type"] == "array" else "Properties"
    return schema | {f"min{what}": 1, f"max{what}": most}


def _typed(name: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": name}, **required}, optional)


def _questions(noul_criteria: Schema, instructions: Schema, level: Schema) -> Schema:
    """The map of questions that System One and Gemini have."""
    instructed = {"instructions": instructions}
    options = _sized({"type": "object", "additionalProperties": _DESCRIBED}, MOST_OPTIONS)
    levels = _sized({"type": "array", "items": level}, MOST_LEVELS)
    kinds = (
        _typed("noul", {}, instructed | {"criteria": either(noul_criteria, NULL)}),
        _typed("choice", {"criteria": options}, instructed),
        _typed("score", {"criteria": levels}, instructed),
    )
    names = {"minLength": 1, "maxLength": LONGEST_NAME}
    entries = {"type": "object", "propertyNames": names, "additionalProperties": either(*kinds)}
    return _sized(entries, MOST_QUESTIONS)


_WORDS: Schema = _STRING | {"minLength": 1}
SYSTEM_ONE_QUESTIONS = _questions(
    closed({}, {"true": _DESCRIBED, "false": _DESCRIBED}), _DESCRIBED, TEXT
)

_GEMINI_TEXT = closed({"type": {"const": "text"}, "text": _WORDS}, {"annotations": {}})
GEMINI_INPUT = either(_STRING, _GEMINI_TEXT, {"type": "array", "items": _GEMINI_TEXT})
GEMINI_QUESTIONS = _questions(
    closed({}, dict.fromkeys(("true_description", "false_description"), either(_STRING, NULL))),
    either(*GEMINI_INPUT["anyOf"], NULL),
    TEXT,
)


def _open(schema: Schema) -> Schema:
    """An item of OpenAI's input or a part of one: unknown fields are ignored."""
    return schema | {"additionalProperties": True}


_INPUT_TEXT = _open(_typed("input_text", {"text": _WORDS}, {}))
_JSON = {"data": either({"type": "object"}, {"type": "array"})}
_INPUT_JSON = _open(_typed("input_json", _JSON, {}))
_PARTS = {"type": "array", "items": either(_INPUT_TEXT, _INPUT_JSON), "minItems": 1}
_OPENAI_TEXT = either(_WORDS, _PARTS)
_TYPE: Schema = {"type": {"const": "message"}}
_MESSAGE = _open(
    closed({"role": {"enum": ["user", "system", "developer"]}, "content": _OPENAI_TEXT}, _TYPE)
)
_OUTPUT_TEXT = _open(_typed("output_text", {"text": _STRING}, {}))
_OUTPUT = either(_STRING, {"type": "array", "items": _OUTPUT_TEXT, "minItems": 1})
_ASSISTANT = _open(closed({"role": {"const": "assistant"}, "content": _OUTPUT}, _TYPE))
_CALL = _open(
    _typed("function_call", {"call_id": _STRING, "name": _STRING, "arguments": _STRING}, {})
)
OPENAI_INPUT = either(
    _STRING, {"type": "array", "items": either(_MESSAGE, _ASSISTANT, _CALL), "minItems": 1}
)
_NAMED: Schema = {"name": either(_STRING | {"maxLength": LONGEST_NAME}, NULL)}
_DESCRIPTION: Schema = {"description": either(_STRING, NULL)}
_OPTION = closed({"value": either(_STRING, {"type": "boolean"})}, _DESCRIPTION)
_LEVEL = closed({"label": _STRING}, _DESCRIPTION)
_OPTIONS = _sized({"type": "array", "items": _OPTION, "uniqueItems": True}, MOST_OPTIONS)
_LEVELS = _sized({"type": "array", "items": _LEVEL}, MOST_LEVELS)
_INSTRUCTED: Schema = {"instructions": _OPENAI_TEXT}
OPENAI_QUESTIONS = _sized(
    {
        "type": "array",
        "items": either(
            _typed("predicate", _INSTRUCTED, _NAMED),
            _typed("choice", {**_INSTRUCTED, "choices": _OPTIONS}, _NAMED),
            _typed("score", {**_INSTRUCTED, "levels": _LEVELS}, _NAMED),
        ),
    },
    MOST_QUESTIONS,
)


def describe(value: Any) -> str:
    """A value's JSON type, for a message."""
    names: dict[type, str] = {str: "text", bool: "true or false", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), "a number")
