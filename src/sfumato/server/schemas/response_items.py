"""JSON schemas of a response's input and tools, for the API description alone.

The code that reads them checks more than their Python types say. Knows no checks.
"""

from __future__ import annotations

from sfumato.server.schemas.json_schemas import NAME, NULL, TEXT, Schema, either

_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 128}


def _object(required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    """Unknown keys pass where they are null."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": NULL,
    }


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


def _parts(*kinds: str) -> Schema:
    part = {"type": {"enum": list(kinds)}, "text": TEXT}
    return {"type": "array", "items": _object(part, {}) | {"additionalProperties": {}}}


_FURTHER: dict[str, Schema] = {
    "id": either(_ID, NULL),
    "status": {},
    "phase": {},
}
_MESSAGE: dict[str, Schema] = {"type": {"const": "message"}, **_FURTHER}
_CALL_TYPE, _OUTPUT_TYPE = {"const": "function_call"}, {"const": "function_call_output"}
INPUT = either(
    TEXT,
    _list(
        either(
            _object(
                {
                    "role": {"enum": ["user", "system", "developer"]},
                    "content": either(TEXT, _parts("input_text")),
                },
                _MESSAGE,
            ),
            _object(
                {"role": {"const": "assistant"}, "content": either(TEXT, _parts("output_text"))},
                _MESSAGE,
            ),
            _object(
                {
                    "type": _CALL_TYPE,
                    "call_id": _ID,
                    "name": {"type": "string", "pattern": NAME},
                    "arguments": {"enum": ["", "{}"]},
                },
                {**_FURTHER, "namespace": {}, "caller": {}, "async": {}, "created_by": {}},
            ),
            _object(
                {
                    "type": _OUTPUT_TYPE,
                    "call_id": _ID,
                    "output": either(TEXT, _parts("input_text")),
                },
                {**_FURTHER, "name": {}, "namespace": {}, "caller": {}, "created_by": {}},
            ),
            _object({"type": {"const": "reasoning"}}, {}) | {"additionalProperties": {}},
            _object({"type": {"const": "item_reference"}, "id": _ID}, {}),
        ),
        least=1,
    ),
)
_FUNCTION = _object(
    {"type": {"const": "function"}, "name": {"type": "string", "pattern": NAME}},
    {
        "description": either(TEXT, NULL),
        "parameters": either({"type": "object"}, NULL),
        "strict": either({"type": "boolean"}, NULL),
        "defer_loading": {},
        "allowed_callers": {},
        "async": {},
        "output_schema": {},
    },
)
TOOLS = either(_list(_FUNCTION), NULL)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    _object({"type": {"const": "function"}, "name": TEXT}, {}),
)
