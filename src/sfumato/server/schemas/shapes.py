"""Objects and lists as JSON schemas, for the API description. Knows no field."""

from __future__ import annotations

from sfumato.server.schemas.json_schemas import NULL, Schema


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object whose unknown fields pass where they are null."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": NULL,
    }


def list_of(items: Schema, least: int = 0) -> Schema:
    """least: items."""
    return {"type": "array", "items": items, "minItems": least}
