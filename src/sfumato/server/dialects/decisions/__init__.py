"""The routes of typed decisions: body → its form → one request → answers, all at once.

A `DecisionRoute` is a path for one form or several. Bodies, threads, disconnects and statuses are
the route function's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.datastructures import Headers
from fastapi.responses import Response

from sfumato.engine import Decided
from sfumato.refused import Refused
from sfumato.server.dialects.decisions.maps import GEMINI_DECISIONS, KEY_HEADER, PATH, SYSTEM_ONE
from sfumato.server.dialects.decisions.openai import OPENAI_DECISIONS
from sfumato.server.dialects.decisions.questions import DecisionBody, DecisionDialect
from sfumato.server.http import inflight, request_body
from sfumato.server.http.errors import (
    ERROR_FORM,
    OPENAI_ERRORS,
    ApiError,
    WrongField,
    without_paths,
)
from sfumato.server.http.route import json_response
from sfumato.server.service import Service


@dataclass(frozen=True)
class DecisionRoute:
    """One POST route for decisions in one form or several."""

    name: str  # in the API description
    path: str
    help: str
    dialects: tuple[DecisionDialect[Any], ...]
    # The form of an error before a body is read, and the body's own. The second raises Refused.
    by_headers: Callable[[Headers], DecisionDialect[Any]]
    by_body: Callable[[Headers, Mapping[str, Any]], DecisionDialect[Any]]


async def reply(route: DecisionRoute, service: Service, http: HttpRequest) -> Response:
    """Raises ApiError, and Refused."""
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
        _check_decides(service)
        call = await run_in_threadpool(dialect.parse, service, route.path, body)
        del body
        with _in_the_words_of(dialect):
            # Within, since the questions are tokenized there.
            running = await inflight.start(service.engine, [call.request], http)
    with _in_the_words_of(dialect):
        (collected,) = await inflight.collect(http, running)
    decided = collected.end
    assert isinstance(decided, Decided)
    headers = inflight.headers_of(running, dialect.errors.request_id)
    return await run_in_threadpool(lambda: json_response(call.answer(decided), headers))


def _check_decides(service: Service) -> None:
    """Raises Refused where the model that is served cannot answer questions."""
    reason = service.model.undecided
    if reason is not None:
        raise Refused(
            None, f"{service.name!r} cannot decide: {without_paths(reason)}", code="unsupported"
        )


@contextmanager
def _in_the_words_of(dialect: DecisionDialect[Any]) -> Iterator[None]:
    """Gives a refusal of the engine the names that fields have in the body. Ids of listed
    questions are numbers."""
    try:
        yield
    except ApiError as error:
        field = None if error.refused is None else error.refused.field
        root, _, name = (field or "").partition(".")
        if error.refused is not None and root in ("state", "questions"):
            names = {"state": dialect.state}
            if dialect.listed and name.isdecimal():
                names[f"{root}.{name}"] = f"questions[{name}]"
            error.rename(names)
            if root == "questions" and not name.isdecimal():
                error.param = root
            reason = error.refused.reason
            text = f"{name}: {reason}" if name and not name.isdecimal() else reason
            error.field = WrongField((root,), text, error.code or "value_error")
        raise


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


_FORMS = (
    "state with questions as an object (System One), input with questions as a list (OpenAI), or "
    f"input with questions as an object and the header {KEY_HEADER} (Gemini)"
)


def _by_headers(headers: Headers) -> DecisionDialect[Any]:
    """The form of errors of a body that cannot be read."""
    return GEMINI_DECISIONS if KEY_HEADER in headers else OPENAI_DECISIONS


def _by_body(headers: Headers, body: Mapping[str, Any]) -> DecisionDialect[Any]:
    """Raises Refused for a body of no form, and for one of two."""
    has_state, has_input = (body.get(name) is not None for name in ("state", "input"))
    questions = body.get("questions")
    if has_state and not has_input and isinstance(questions, dict):
        return SYSTEM_ONE
    if has_input and not has_state:
        if isinstance(questions, list):
            return OPENAI_DECISIONS
        if isinstance(questions, dict) and KEY_HEADER in headers:
            return GEMINI_DECISIONS
    raise Refused(None, f"the body must have one of three forms: {_FORMS}", code="unknown_form")


ROUTES = (
    DecisionRoute(
        name="systemone",
        path=PATH,
        help="System One: questions about a state, answered with probabilities.",
        dialects=(SYSTEM_ONE,),
        by_headers=lambda headers: SYSTEM_ONE,
        by_body=lambda headers, body: SYSTEM_ONE,
    ),
    DecisionRoute(
        name="decisions",
        path="/v1/decisions",
        help=f"Questions answered with probabilities: {_FORMS}.",
        dialects=(OPENAI_DECISIONS, SYSTEM_ONE, GEMINI_DECISIONS),
        by_headers=_by_headers,
        by_body=_by_body,
    ),
)
