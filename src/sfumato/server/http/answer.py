"""A whole answer of OpenAI's as one JSON response. Knows no fields of it but its choices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.responses import Response


def response(
    fields: Mapping[str, Any], choices: Iterable[dict[str, Any]], headers: Mapping[str, str]
) -> Response:
    """To be called in a thread: tokens with alternatives take long to encode. Choices are made and
    encoded one by one, so that the objects of one reply are there at a time."""
    encoded = ",".join(map(_json, choices))
    body = f'{_json(fields)[:-1]},"choices":[{encoded}]}}'
    return Response(body, headers=dict(headers), media_type="application/json")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
