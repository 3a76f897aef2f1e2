"""JSON schemas of Anthropic's messages, blocks and tools, for the API description."""

from __future__ import annotations

from sfumato.server.schemas.json_schemas import NAME, NULL, TEXT, Schema, either
from sfumato.server.schemas.shapes import closed, list_of

_ANY: Schema = {}
_CACHED = {"cache_control": _ANY}


def _block(name: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": name}, **required}, optional)


_TEXT = _block("text", {"text": TEXT}, _CACHED | {"citations": _ANY})
_TEXTS = either(TEXT, list_of(_TEXT))
_THINKING = _block("thinking", {"thinking": TEXT}, {"signature": _ANY})
_REDACTED = _block("redacted_thinking", {}, {"data": _ANY})
_CALL = _block(
    "tool_use",
    {"id": TEXT, "name": {"type": "string", "pattern": NAME}, "input": {"type": "object"}},
    _CACHED | {"caller": _ANY, "toolset_name": _ANY},
)
_RESULT = _block(
    "tool_result",
    {"tool_use_id": TEXT},
    _CACHED | {"content": either(_TEXTS, NULL), "is_error": _ANY, "toolset_name": _ANY},
)

SYSTEM = either(_TEXTS, NULL)
MESSAGES = list_of(
    either(
        closed({"role": {"const": "system"}, "content": _TEXTS}),
        closed(
            {"role": {"const": "user"}, "content": either(TEXT, list_of(either(_TEXT, _RESULT)))}
        ),
        closed(
            {
                "role": {"const": "assistant"},
                "content": either(TEXT, list_of(either(_TEXT, _THINKING, _REDACTED, _CALL))),
            }
        ),
    ),
    least=1,
)
TOOLS = either(
    list_of(
        closed(
            {"name": {"type": "string", "pattern": NAME}, "input_schema": {"type": "object"}},
            {
                "type": {"enum": ["custom", None]},
                "description": either(TEXT, NULL),
                "strict": either({"type": "boolean"}, NULL),
                "cache_control": _ANY,
                "input_examples": _ANY,
                "eager_input_streaming": _ANY,
                "allowed_callers": _ANY,
                "defer_loading": _ANY,
            },
        )
    ),
    NULL,
)
