"""From the bytes of a body to its model, with errors that name the field.

Unknown fields are refused, or, where the server is lenient, left out.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Never, TypeVar, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError

from sfumato.server.errors import CLIENT_GONE, ApiError, bad_request
from sfumato.server.schemas import Body

Model = TypeVar("Model", bound=Body)

BODY_S = 30.0  # a body must have arrived by then

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps a pair with another one
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "nullable"}  # branches of a union


async def read(request: Request, model: type[Model], lenient: bool) -> Model:
    """Raises ApiError."""
    return validated(parse(await _arrived(request)), model, lenient)


async def _arrived(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await _whole(request)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {BODY_S:g} seconds; send it faster, or less",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None


async def _whole(request: Request) -> bytes:
    parts = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_GONE, "the client has gone")
        parts += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(parts)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError for anything else."""
    try:
        value = json.loads(body, parse_constant=_constant)
        if _HALF.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise bad_request("the body holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _constant(name: str) -> Never:
    raise ValueError(f"{name} is no number in JSON")


def validated(value: dict[str, Any], model: type[Model], lenient: bool) -> Model:
    """The body's model. Raises ApiError."""
    unknown = list(_unknown(value, model))
    if unknown and not lenient:
        names = ", ".join(unknown[:20])
        raise bad_request(
            f"{names}: unknown; remove it, or start the server with --lenient",
            unknown[0],
            "unknown_field",
        )
    try:
        body = model.model_validate(_known(value, model))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
    else:
        body.ignored.extend(unknown)
        return body
    raise _refusal(found[0]["loc"], found[0]["msg"], found[0]["type"])


def _unknown(value: Mapping[str, Any], model: type[BaseModel], where: str = "") -> Iterator[str]:
    """The names of fields that the model has not: before validation, which makes an error of
    each. Null always means that a field is not there."""
    for name, item in value.items():
        if item is not None and name not in model.model_fields:
            yield f"{where}{name[:100]}"
    for name, part in _parts(model).items():
        if isinstance(inner := value.get(name), dict):
            yield from _unknown(inner, part, f"{where}{name}.")


def _known(value: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The fields that the model has."""
    found = {name: item for name, item in value.items() if name in model.model_fields}
    for name, part in _parts(model).items():
        if isinstance(inner := found.get(name), dict):
            found[name] = _known(inner, part)
    return found


@lru_cache
def _parts(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields that are models themselves, or null."""
    found = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _refusal(loc: Sequence[int | str], message: str, kind: str) -> ApiError:
    name = _name(loc)
    if kind == "value_error":  # from `only`
        return bad_request(f"{name}: {message.removeprefix('Value error, ')}", name, "unsupported")
    text = message[:1].lower() + message[1:]
    code = kind if kind == "missing" else None
    return bad_request(f"{name}: {text}", name, code)


def _name(loc: Sequence[int | str]) -> str:
    """("messages", 0, "role") → "messages[0].role", without the branches of unions."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not name:
            name = part[:100]
        elif part not in _TYPE_NAMES and "[" not in part and "-" not in part:
            name += f".{part[:100]}"
    return name
