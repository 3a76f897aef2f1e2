"""The route function of typed decisions: body → its form → one request → answers, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.datastructures import Headers
from fastapi.responses import Response

from sfumato.engine import DecisionRequest
from sfumato.refused import Refused
from sfumato.server.http import answer, request_body
from sfumato.server.http.decision_dialect import DecisionDialect
from sfumato.server.http.errors import (
    ERROR_FORM,
    OPENAI_ERRORS,
    ApiError,
    WrongField,
)
from sfumato.server.http.pending_decision import PendingDecision
from sfumato.server.schemas.decisions import DecisionBody
from sfumato.server.service import Service


@dataclass(frozen=True)
class DecisionRoute:
    """One POST route for decisions in one form or several."""

    name: str  # in the API description
    path: str
    tag: str
    help: str
    dialects: tuple[DecisionDialect[Any], ...]
    # The form of an error before a body is read, and the body's own. The second raises ApiError.
    by_headers: Callable[[Headers], DecisionDialect[Any]]
    by_body: Callable[[Headers, Mapping[str, Any]], DecisionDialect[Any]]


async def reply(route: DecisionRoute, service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    await _refuse_multipart(http)
    dialect = route.by_headers(http.headers)

    def decode(data: bytearray) -> DecisionBody:
        nonlocal dialect
        try:
            value = request_body.parse(data, service.settings.max_values, names_repeat=False)
        except Refused as error:
            answer = ApiError.of(error)
            answer.field = WrongField((), answer.message, answer.code or "json_invalid")
            raise answer from None
        data.clear()
        http.scope[ERROR_FORM] = OPENAI_ERRORS  # of a body of no form, or of two
        dialect = route.by_body(http.headers, value)
        http.scope[ERROR_FORM] = dialect.errors
        return request_body.validated(value, dialect.body_type, lenient=True)

    async with request_body.read_with(service, http, decode) as body:
        call = await run_in_threadpool(dialect.parse, service, route.path, body)
        del body
        pending = PendingDecision(service.engine, call.request)
        with _explained(dialect, call.request):
            # Within, since the questions are tokenized there.
            await pending.begin()
    with _explained(dialect, call.request):
        decided = await pending.result(http)
    headers = _headers(dialect, call.request)
    return await run_in_threadpool(lambda: answer.response(call.answer(decided), headers))


def _headers(dialect: DecisionDialect[Any], request: DecisionRequest) -> dict[str, str]:
    headers = {"X-Request-Id": request.id}
    if dialect.errors.request_id:
        headers[dialect.errors.request_id] = request.id
    return headers


@contextmanager
def _explained(dialect: DecisionDialect[Any], request: DecisionRequest) -> Iterator[None]:
    """Gives an ApiError that is raised within the request's id and the body's words."""
    try:
        yield
    except ApiError as error:
        error.headers |= _headers(dialect, request)
        _in_the_bodys_words(error, dialect)
        raise


def _in_the_bodys_words(error: ApiError, dialect: DecisionDialect[Any]) -> None:
    """Gives a refusal of the engine the names that fields have in the body. Ids of listed
    questions are numbers."""
    refused = error.refused
    if refused is None or refused.field is None:
        return
    root, _, name = refused.field.partition(".")
    if root not in ("state", "questions"):
        return
    names = {"state": dialect.state}
    if dialect.listed and name.isdecimal():
        names[refused.field] = f"questions[{name}]"
    error.rename(names)
    if root == "questions" and not name.isdecimal():
        error.param = root
    text = f"{name}: {refused.reason}" if name and not name.isdecimal() else refused.reason
    error.field = WrongField((root,), text, error.code or "value_error")


async def _refuse_multipart(http: HttpRequest) -> None:
    """System One's clients send images in bodies of several parts."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        await request_body.discard(http)
        raise Refused(
            None,
            f"Content-Type: {kind[:40]} is how images are sent, which are not supported yet",
            "send JSON without assets",
            code="unsupported",
        )
