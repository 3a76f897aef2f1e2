"""An answer as one JSON response, whose long lists are encoded item by item. Knows no field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.responses import Response


def response(fields: Mapping[str, Any] | Iterator[Any], headers: Mapping[str, str]) -> Response:
    """To be called in a thread: tokens with alternatives take long to encode. The items of an
    iterator are made and encoded one by one, so that one reply's objects exist at a time."""
    if isinstance(fields, Iterator):
        return Response(_value(fields), headers=dict(headers), media_type="application/json")
    encoded = ",".join(f"{json.dumps(name)}:{_value(value)}" for name, value in fields.items())
    return Response(f"{{{encoded}}}", headers=dict(headers), media_type="application/json")


def _value(value: Any) -> str:
    return f"[{','.join(map(_json, value))}]" if isinstance(value, Iterator) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
