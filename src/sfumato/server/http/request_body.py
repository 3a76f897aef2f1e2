"""From the bytes of a body to its model, with errors that name the field.

The cost of a body is bounded before it is decoded: `admission` bounds bytes, `jsonscan` values. A
body may arrive compressed with zstd, and is bounded by what comes out of it. A body is decoded and
validated in a thread, and validation stops at the first error. Unknown fields are refused or, where
the server is lenient, left out.

The zstd library is Python's own `compression.zstd`, before 3.14 as `backports.zstd`, by the same
author and with the same names. Its decompressor gives as many bytes as it is asked for, so that a
body of a few bytes that stands for gigabytes takes no more memory than a body may have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar, get_args

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from sfumato.refused import Refused
from sfumato.server.http.admission import SMALL, Admission, Arrival, Budget, arriving
from sfumato.server.http.errors import CLIENT_GONE, ApiError, WrongField, refusal
from sfumato.server.http.middleware import OWNER, BodyTooLarge
from sfumato.server.schemas import Body, Unknown
from sfumato.server.service import Service
from sfumato.text.jsonscan import JsonTooDeep, JsonTooLarge, extent, values_of

MOST_WINDOW = 23  # log2 of bytes that a frame may refer back to: RFC 9659 allows 8 MiB over HTTP
_SUPPORTED = {"": False, "identity": False, "zstd": True}


def is_zstd(encoding: str) -> bool:
    """Whether a Content-Encoding is zstd. Raises ApiError for one that is not supported."""
    name = encoding.strip().lower()
    if name not in _SUPPORTED:
        raise ApiError(
            415,
            f"Content-Encoding: {name[:40]!r} is not supported; send the body as it is, or "
            "compressed with zstd",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "zstd"},
        )
    return _SUPPORTED[name]


def expanded(data: bytearray, most: int) -> bytearray:
    """The bytes of one zstd frame; empties `data`. Raises BodyTooLarge where they are more than
    `most`, after so many of them at most; ApiError for what is no such frame."""
    # Only servers whose clients compress need it.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    try:
        declared = zstd.get_frame_info(data).decompressed_size
        if declared is not None and declared > most:
            raise BodyTooLarge(most)
        options = {int(zstd.DecompressionParameter.window_log_max): MOST_WINDOW}
        decompressor = zstd.ZstdDecompressor(options=options)
        content = bytearray()
        given: bytes | bytearray = data
        while not decompressor.eof and len(content) <= most:
            part = decompressor.decompress(given, most + 1 - len(content))
            given = b""
            content += part
            if not part and decompressor.needs_input:
                raise _broken("the body's zstd data is cut short")
    except zstd.ZstdError as error:
        raise _broken(
            f"the body is not zstd, as its Content-Encoding says: {str(error)[:200]}"
        ) from None
    if len(content) > most:
        raise BodyTooLarge(most)
    if decompressor.unused_data:
        raise _broken("the body is more than one zstd frame; send one")
    data.clear()
    return content


def _broken(message: str) -> ApiError:
    error = ApiError.of(Refused(None, message, code="bad_encoding"))
    error.field = WrongField((), message, "bad_encoding")
    return error


Model = TypeVar("Model", bound=Body)

BODY_S = 30.0  # a body must have arrived by then
DISCARD_S = 5.0  # for a body that is refused, and still comes

_BOM = b"\xef\xbb\xbf"


@asynccontextmanager
async def read(service: Service, request: Request, model: type[Model]) -> AsyncIterator[Model]:
    """The body as its model. The context holds the body's bytes of the budget and its thread: work
    that takes time with the body belongs within. Raises ApiError."""
    settings = service.settings

    def decode(data: bytearray) -> Model:
        return decoded(data, model, settings.lenient, settings.max_values)

    async with read_with(service, request, decode) as body:
        yield body


@asynccontextmanager
async def read_with(
    service: Service, request: Request, decode: Callable[[bytearray], Model]
) -> AsyncIterator[Model]:
    """The same for a body whose model its content decides. decode: called in a thread with the
    body's bytes."""
    async with AsyncExitStack() as held:
        data, threads, decode = await _receive(request, service.admission, held, decode)
        since = service.now()
        await held.enter_async_context(threads.hold())
        body = await run_in_threadpool(decode, data)
        body.envelope.since = since
        body.envelope.owner = request.scope.get(OWNER, "")
        body.envelope.apart = threads.lend
        yield body


async def _receive(
    request: Request,
    admission: Admission,
    held: AsyncExitStack,
    decode: Callable[[bytearray], Model],
) -> tuple[bytearray, Budget, Callable[[bytearray], Model]]:
    """The bytes of the body, the threads that decode bodies of its size, and what decodes it;
    `held` gets the budget of a large one."""
    try:
        compressed = is_zstd(request.headers.get("content-encoding", ""))
    except ApiError:
        await discard(request)
        raise
    # A large body that is compressed holds room for its bytes and for what comes out of them.
    room = admission.max_body if compressed else 0
    header = request.headers.get("content-length", "")
    known = header.isascii() and header.isdecimal() and len(header) < 20
    length, data = int(header) if known else admission.max_body, bytearray()
    is_small = not known or length <= SMALL
    if is_small:
        async with arriving(BODY_S) as arrival:
            is_small = await _add_chunks(request, data, arrival, SMALL)
    if not is_small:
        try:
            await held.enter_async_context(admission.bodies.hold(length + room))
        except ApiError:
            await discard(request)
            raise
        async with arriving(BODY_S, admission.bodies) as arrival:
            await _add_chunks(request, data, arrival, admission.max_body)
    if len(data) > admission.max_body:
        raise BodyTooLarge(admission.max_body)
    if is_small:
        try:
            content = expanded(data, min(SMALL, admission.max_body)) if compressed else data
            return content, admission.small, decode
        except BodyTooLarge:
            await held.enter_async_context(admission.bodies.hold(room))
    if compressed:
        return data, admission.large, lambda data: decode(expanded(data, admission.max_body))
    return data, admission.large, decode


async def discard(request: Request) -> None:
    """Reads and drops the body: most clients send all of it before they read an answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await request.receive()).get("more_body", False):
                pass


async def _add_chunks(request: Request, data: bytearray, arrival: Arrival, most: int) -> bool:
    """Adds the body's chunks to `data`; False once there are over `most` bytes and more follow."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_GONE, "the client has gone")
        data += message.get("body", b"")
        arrival.nbytes = len(data)
        if not message.get("more_body", False):
            return True
        if len(data) > most:
            return False


def decoded(data: bytearray, model: type[Model], lenient: bool, most_values: int) -> Model:
    """The model of a body; empties `data`. Raises ApiError."""
    return validated(parse(data, most_values), model, lenient)


def without_large_fields(body: Model) -> Model:
    """The body without its lists, objects and longer texts: a server may hold hundreds of bodies
    while their replies are written."""
    large = [
        name
        for name, value in body
        if isinstance(value, list | dict) or (isinstance(value, str) and len(value) > 1000)
    ]
    return body.model_copy(update=dict.fromkeys(large))


def parse(data: bytearray, most_values: int, names_repeat: bool = True) -> dict[str, Any]:
    """A JSON object in UTF-8; empties `data`. names_repeat: whether a name may stand twice in an
    object, of which the last counts. Raises ApiError for anything else."""
    try:
        counts = extent(data, most_values)
    except JsonTooLarge as error:
        hint = "" if isinstance(error, JsonTooDeep) else "send less, or raise --max-values"
        raise Refused(None, f"the body {error}", hint, "body_too_complex") from None
    try:
        if data.startswith(_BOM):
            del data[: len(_BOM)]
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        has_none = b"NaN" in data or b"Infinity" in data
        hint = "; NaN and Infinity are no numbers in JSON" if has_none else ""
        raise Refused(None, f"the body is not JSON: {str(error)[:200]}{hint}") from None
    data.clear()
    if not isinstance(value, dict):
        raise Refused(None, "the body must be a JSON object")
    if not names_repeat and values_of(value) != counts.values:
        raise Refused(
            None,
            "an object of the body has the same name twice",
            "give each question, option and field a name of its own",
            code="repeated_name",
        )
    return value


def validated(value: dict[str, Any], model: type[Model], lenient: bool) -> Model:
    """The body's model. Raises ApiError."""
    unknown = Unknown(lenient)
    unknown.add(_unknown(value, model))
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        results = error.errors(include_url=False, include_context=False)
    else:
        body.envelope.unknown = unknown
        return body
    first = results[0]
    for error_of_branch in results:  # of a union, the first is about another branch
        given = error_of_branch["input"]
        is_point = error_of_branch["type"] == "int_type" and isinstance(given, float)
        if is_point and given.is_integer() and error_of_branch["loc"][0] == first["loc"][0]:
            text = f"whole numbers are written without a decimal point, and not as {given!r}"
            raise refusal(error_of_branch["loc"], text, "int_type")
    raise refusal(first["loc"], first["msg"], first["type"])


def _unknown(value: Mapping[str, Any], model: type[BaseModel], where: str = "") -> Iterator[str]:
    """The names of fields that the model has not: before validation, which leaves them
    out. Null always means that a field is not there."""
    for name, item in value.items():
        if item is not None and name not in _fields(model):
            yield f"{where}{name[:100]}"
    for name, part in _parts(model).items():
        if isinstance(inner := value.get(name), dict):
            yield from _unknown(inner, part, f"{where}{name}.")


@lru_cache
def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields by the names that bodies have them under."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


@lru_cache
def _parts(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields that are models themselves, or null."""
    results = {}
    for name, field in _fields(model).items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                results[name] = kind
    return results
