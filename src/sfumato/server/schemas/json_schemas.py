"""JSON schemas of fields for which the code checks more than their Python types say.

For the API description alone, so that bodies that it allows are accepted. Bodies write out their
fields and types; ranges and help texts come from `options/`. Knows no checks."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sfumato.options import MODES, SAMPLERS, SETTINGS, setting
from sfumato.options.limits import (
    LONGEST_STOP,
    MOST_BIAS,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_HOLES,
    MOST_STOPS,
    MOST_TOKENS,
)
from sfumato.values import Kind, Number

SETTING_OF = {each.request_field: each for each in SETTINGS if each.request_field}
"""Name of a field → its setting."""


def within(name: str) -> Any:
    """The range of a setting, for the annotation of a field whose body checks it. The other
    ranges are checked where the settings become a `SamplerConfig`."""
    kind = setting(name).request_kind
    assert isinstance(kind, Number)
    open_low = kind.low in kind.without
    return Field(gt=kind.low, le=kind.high) if open_low else Field(ge=kind.low, le=kind.high)


def greatest(name: str) -> float | None:
    """The greatest value of a field that is a number."""
    kind = SETTING_OF[name].request_kind
    assert isinstance(kind, Number)
    return kind.high


def add_setting(name: str, schema: dict[str, Any]) -> None:
    """Adds range and description of the setting of a field, if it has one, to its JSON schema. A
    description that is there is a note, and stays behind the table's."""
    if name not in SETTING_OF:
        return
    chosen = SETTING_OF[name]
    schema |= _range(chosen.request_kind)
    help_text = f"{chosen.help[0].upper()}{chosen.help[1:]}."
    note = schema.get("description")
    schema["description"] = f"{help_text} {note}" if note else help_text


def _range(kind: Kind) -> dict[str, Any]:
    """The bounds of a number as JSON schema has them; empty for another kind."""
    if not isinstance(kind, Number):
        return {}
    low = "exclusiveMinimum" if kind.low in kind.without else "minimum"
    high = "exclusiveMaximum" if kind.high in kind.without else "maximum"
    return {low: kind.low} | ({} if kind.high is None else {high: kind.high})


Schema = dict[str, Any]

# Thinking tokens that an effort allows; None: all but what the answer needs.
EFFORTS = {
    "none": 0,
    "minimal": 0,
    "low": 512,
    "medium": 2048,
    "high": None,
    "xhigh": None,
    "max": None,
}

NAME = "^[A-Za-z0-9_.-]{1,128}$"  # of a tool
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def open_object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object that may have any further field."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object whose unknown fields pass where they are null."""
    return open_object(required, optional) | {"additionalProperties": NULL}


def list_of(items: Schema, least: int = 0) -> Schema:
    """least: items."""
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


IDS = list_of({"type": "integer", "minimum": 0})
PROMPT_IDS = IDS | {"minItems": 1}
PROMPTS = either(TEXT, list_of(TEXT, 1), PROMPT_IDS, list_of(PROMPT_IDS, 1))
_MIXED = list_of(either({"type": "integer", "minimum": 0}, TEXT), 1)
_TEXT_PARTS = list_of(open_object({"type": {"const": "text"}, "text": TEXT}))
MIXED_PROMPT = either(
    TEXT,
    _MIXED,
    *(
        open_object(one) | {"additionalProperties": False}
        for one in ({"prompt_string": TEXT}, {"content": _TEXT_PARTS})
    ),
)
MIXED_PROMPTS = either(MIXED_PROMPT, list_of(MIXED_PROMPT, 1))
EMBEDDING_INPUT = either(MIXED_PROMPT, list_of(MIXED_PROMPT, 1) | {"maxItems": 2048})
MAX_TOKENS = either({"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}, {"const": -1}, NULL)
MAX_TOKENS_OR_NONE = either({"type": "integer", "minimum": -1, "maximum": MOST_TOKENS}, NULL)
STOP = either(
    {"type": "string", "maxLength": LONGEST_STOP},
    list_of({"type": "string", "maxLength": LONGEST_STOP}) | {"maxItems": MOST_STOPS},
    NULL,
)
BIAS = either(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        "maxProperties": MOST_BIASES,
    },
    NULL,
)
_BIAS_OR_BAN: Schema = either(
    {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS}, {"const": False}
)
LLAMA_BIAS = either(
    {
        "type": "object",
        "propertyNames": {"maxLength": LONGEST_STOP},
        "additionalProperties": _BIAS_OR_BAN,
        "maxProperties": MOST_BIASES,
    },
    {
        "type": "array",
        "maxItems": MOST_BIASES,
        "items": {
            "type": "array",
            "prefixItems": [
                either({"type": "integer", "minimum": 0}, TEXT | {"maxLength": LONGEST_STOP}),
                _BIAS_OR_BAN,
            ],
            "minItems": 2,
            "maxItems": 2,
        },
    },
    NULL,
)
SAMPLER: Schema = {"enum": [*SAMPLERS, None]}
MODE: Schema = {"enum": [*MODES, None]}
EFFORT: Schema = {"enum": [*EFFORTS, None]}


def with_settings(schema: Schema) -> None:
    """Completes the schema of a body."""
    schema["additionalProperties"] = NULL
    for name, field in schema["properties"].items():
        add_setting(name, field)


TEXTS = either(TEXT, _TEXT_PARTS)
_NAMED: Schema = {"name": {}}  # of a tool's message alone it is read
_ARGUMENTS = either({"type": "object"}, {"const": ""}, {"const": "{}"}, NULL)
_CALL = open_object(
    {
        "function": open_object(
            {"name": {"type": "string", "pattern": NAME}}, {"arguments": _ARGUMENTS}
        )
    },
    {"id": either(TEXT, NULL), "type": {"const": "function"}},
)
MESSAGES = list_of(
    either(
        closed({"role": {"enum": ["system", "developer", "user"]}, "content": TEXTS}, _NAMED),
        closed(
            {"role": {"const": "assistant"}},
            _NAMED
            | {"content": either(TEXTS, NULL), "tool_calls": either(list_of(_CALL), NULL)}
            | {"refusal": either(TEXT, NULL), "annotations": {}, "audio": NULL}
            | {"function_call": NULL, "reasoning_content": {}, "reasoning": {}},
        ),
        closed(
            {"role": {"const": "tool"}, "content": TEXTS},
            {"name": either(TEXT, NULL), "tool_call_id": either(TEXT, NULL)},
        ),
    ),
    least=1,
)

_FUNCTION = open_object(
    {"name": {"type": "string", "pattern": NAME}},
    {
        "description": either(TEXT, NULL),
        "parameters": either({"type": "object"}, NULL),
        "strict": either(FLAG, NULL),
    },
)
TOOLS = either(list_of(open_object({"type": {"const": "function"}, "function": _FUNCTION})), NULL)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    open_object({"type": {"const": "function"}, "function": open_object({"name": TEXT})}),
)

_COUNT = {"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}
_CHOICES = list_of(TEXT | {"minLength": 1}, 1) | {"maxItems": MOST_CHOICES, "uniqueItems": True}
PARTS = list_of(
    either(
        TEXT,
        *(
            closed({name: values})
            for name, values in (("tokens", _COUNT), ("at_most", _COUNT), ("choices", _CHOICES))
        ),
    ),
    least=1,
) | {"maxItems": 2 * MOST_HOLES + 1}
EXTRA = either(list_of(open_object({"text": TEXT}, {"filename": either(TEXT, NULL)})), NULL)
