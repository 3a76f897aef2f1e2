"""JSON schemas of Ollama's messages, formats and thinking, for the API description."""

from __future__ import annotations

from sfumato.server.schemas.json_schemas import IDS, NAME, NULL, TEXT, Schema, either
from sfumato.server.schemas.shapes import closed, list_of

LEVELS = ("low", "medium", "high", "max")
THINK: Schema = {"enum": [True, False, *LEVELS, None]}
FORMAT = either({"enum": ["", "json", None]}, {"type": "object"})
NO_IDS = either(IDS | {"maxItems": 0}, NULL)
_ANY: Schema = {}
_NO_IMAGES: Schema = {"images": either({"const": []}, NULL)}
_CALL = closed(
    {"function": closed({"name": {"type": "string", "pattern": NAME}}, {"arguments": _ANY})},
    {"id": _ANY, "type": {"const": "function"}},
)
_CALL["properties"]["function"]["properties"] |= {
    "arguments": either({"type": "object"}, NULL),
    "index": _ANY,
    "description": _ANY,
}
_TEXT = {"content": TEXT}
MESSAGES = either(
    list_of(
        either(
            closed({"role": {"enum": ["system", "developer", "user"]}, **_TEXT}, _NO_IMAGES),
            closed(
                {"role": {"const": "assistant"}},
                _NO_IMAGES
                | {"content": either(TEXT, NULL), "thinking": _ANY}
                | {"tool_calls": either(list_of(_CALL), NULL), "tool_name": NULL},
            ),
            closed(
                {"role": {"const": "tool"}, **_TEXT},
                _NO_IMAGES
                | {name: either(TEXT, NULL) for name in ("tool_name", "name", "tool_call_id")},
            ),
        )
    ),
    NULL,
)
