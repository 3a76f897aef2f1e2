"""JSON schemas drawn at random whose values are all bounded, and the check of an instance."""

from __future__ import annotations

import json
import random
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]
_NAMES = ("name", "age", "kind", "x", "total_price", "is_ok", "tags", "a b", "id-2", 'q"t')
_PATTERNS = ("^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,5}$")
_VALUES = ("red", "green", "", "a\nb", 'say "x"', 0, -7, 2.5, True, None)


def random_schema(seed: int) -> Schema:
    return _schema(random.Random(seed), depth=0)


def _schema(chosen: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _enum, _boolean]
    if depth < 3:
        kinds += [_object, _array, _any_of] * (2 if depth else 4)
    return chosen.choice(kinds)(chosen, depth)


def _string(chosen: random.Random, depth: int) -> Schema:
    if chosen.random() < 0.3:
        return {"type": "string", "pattern": chosen.choice(_PATTERNS)}
    if chosen.random() < 0.15:
        return {"type": "string", "format": chosen.choice(["date", "uuid", "ipv4"])}
    low = chosen.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + chosen.randrange(9)}


def _integer(chosen: random.Random, depth: int) -> Schema:
    low = chosen.randrange(-50, 100)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + chosen.randrange(200)}
    return schema | ({"multipleOf": 1} if chosen.random() < 0.2 else {})


def _number(chosen: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "number", "minimum": -1, "exclusiveMaximum": 100}
    return schema | ({"multipleOf": chosen.choice([0.5, 0.01])} if chosen.random() < 0.4 else {})


def _boolean(chosen: random.Random, depth: int) -> Schema:
    return {"type": chosen.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(chosen: random.Random, depth: int) -> Schema:
    values = chosen.sample(_VALUES, chosen.randrange(1, 5))
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _object(chosen: random.Random, depth: int) -> Schema:
    names = chosen.sample(_NAMES, chosen.randrange(0, 5))
    required = [name for name in names if chosen.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: _schema(chosen, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(chosen: random.Random, depth: int) -> Schema:
    low = chosen.randrange(3)
    items = _schema(chosen, depth + 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}


def _any_of(chosen: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chosen, depth + 1) for _ in range(chosen.randrange(1, 4))]}


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that the schema allows; multiples are checked in decimals."""
    plain = _without(schema, "multipleOf")
    validator = jsonschema_rs.Draft202012Validator(plain, validate_formats=False)
    value = json.loads(text, parse_float=_finite)
    return bool(validator.is_valid(value)) and _multiples(
        schema, json.loads(text, parse_float=_decimal)
    )


def _finite(text: str) -> float:
    """A number; JSON does not bound its exponent, as floats do."""
    return max(-1e308, min(float(text), 1e308))


def _decimal(text: str) -> Decimal:
    """A number; 0 where its exponent is none that decimals have."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(0)


def _multiples(schema: Any, value: Any) -> bool:
    """Whether each number that must be a multiple is one; of alternatives one may be wrong."""
    if not isinstance(schema, dict):
        return True
    step = schema.get("multipleOf")
    if step is not None and isinstance(value, int | Decimal) and not isinstance(value, bool):
        return Fraction(value) % Fraction(str(step)) == 0
    if "anyOf" in schema:
        return any(_multiples(each, value) for each in schema["anyOf"])
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        return all(_multiples(parts.get(key), item) for key, item in value.items())
    items = schema.get("items") if isinstance(value, list) else None
    return items is None or all(_multiples(items, item) for item in value)


def _without(schema: Any, keyword: str) -> Any:
    if isinstance(schema, dict):
        return {k: _without(v, keyword) for k, v in schema.items() if k != keyword}
    return [_without(v, keyword) for v in schema] if isinstance(schema, list) else schema
