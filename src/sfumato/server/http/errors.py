"""`ApiError`: failures as HTTP statuses, and as OpenAI's error objects where no dialect differs.

What a route raises becomes an answer in the form of its dialect. What reaches a client says what is
wrong and what to do; paths and traces stay here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.exceptions import StarletteHTTPException as HTTPException
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from sfumato.engine import EngineDead, Failed, NotReady, QueueFull, TooLarge
from sfumato.engine import Request as EngineRequest
from sfumato.engine.request import AnyRequest, new_id
from sfumato.refused import Refused

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
RETRY_LATER = {"Retry-After": str(RETRY_AFTER_S)}
GOODBYE = {"Connection": "close"}  # of a server that ends: the next request goes to another one
CLIENT_GONE = 499  # as nginx writes it; there is no client to read it
# Keys of an ASGI scope.
REFUSAL = "sfumato.refusal"  # the ApiError of its answer
ERROR_FORM = "sfumato.error_form"  # the `ErrorForm` of its path's dialect

_PROMPT = ("prompt", "ids", "text")  # names of the prompt in errors of the engine
_PATH = re.compile(r"(?<![\w/.:])/(?:[^\s/'\",;]+/)+([^\s/'\",;]*)")
_STATUS = {
    "invalid": 400,
    "too_large": 400,
    "queue_full": 503,  # so that a gateway tries another server; 429 would be the client's rate
    "not_ready": 503,
    "timeout": 504,
    "cancelled": CLIENT_GONE,
    "shutdown": 503,
    "memory": 503,
    "internal": 500,
}
_REFUSALS = (
    (QueueFull, 503, "queue_full"),
    (NotReady, 503, "not_ready"),
    (EngineDead, 503, "engine_unavailable"),
)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""The schema of every error's body, for the API description."""


@dataclass(frozen=True)
class WrongField:
    """Where a body is wrong, for forms of errors that have a field for that."""

    loc: tuple[int | str, ...]  # from the body's top, without the branches of unions
    message: str  # without the field's name
    kind: str  # pydantic's word: "missing", "string_type" …


Wording = Mapping[str, str]
"""What a body calls the fields of the engine, as `Refused.renamed` takes it."""


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """more: further fields of the error's object; they replace fields of the same name."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.more = headers or {}, more or {}
        self.recorded = False  # the engine has counted it, and the audit log has it
        self.field: WrongField | None = None
        self.refused: Refused | None = None  # what the message was made of

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, refused: Refused) -> ApiError:
        """The answer to what is refused. What exceeds the context has OpenAI's code, and
        llama-server's type and numbers."""
        answer = cls(400, "", code=refused.code)
        answer._say(refused)
        if refused.recorded is not None:
            answer.recorded, answer.headers["X-Request-Id"] = True, refused.recorded
        if isinstance(refused, TooLarge):
            answer.more = {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": refused.prompt_tokens,
                "n_ctx": refused.context,
            }
        return answer

    def rename(self, names: Wording) -> None:
        """Gives the fields the names of the body."""
        if self.refused is not None:
            self._say(self.refused.renamed(names))

    def _say(self, refused: Refused) -> None:
        self.refused, self.param = refused, refused.field
        self.message = without_paths(str(refused))

    def response(self, scope: MutableMapping[str, Any]) -> Response:
        """The answer to the request of that ASGI scope, as its dialect renders errors."""
        scope[REFUSAL] = self
        form: ErrorForm = scope.get(ERROR_FORM, OPENAI_ERRORS)
        if not self.recorded:  # by the engine, under a name that this would not be
            self.headers.setdefault("X-Request-Id", new_id())
        if form.request_id is not None and "X-Request-Id" in self.headers:
            self.headers[form.request_id] = self.headers["X-Request-Id"]
        headers = self.headers
        if self.status in (500, 504):  # OpenAI's clients would ask, and wait, again
            headers = headers | {"x-should-retry": "false"}
        return JSONResponse(form.body(self), form.status(self), headers)


_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "nullable"}  # branches of a union


def refusal(loc: Sequence[int | str], message: str, kind: str, name: str | None = None) -> ApiError:
    """The answer to a wrong field. kind: pydantic's word. name: as the message has it, where the
    path does not say it."""
    name = name or _name(loc)
    text = message.removeprefix("Value error, ")
    code = {"value_error": "unsupported", "missing": "missing"}.get(kind)  # the first: of `only`
    if kind != "value_error":
        text = text[:1].lower() + text[1:]
    error = ApiError.of(Refused(name, text, code=code))
    parts = tuple(part if isinstance(part, int) else part[:100] for part in loc)
    error.field = WrongField(parts, text, kind)
    return error


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


ErrorBody = Callable[[ApiError], dict[str, Any]]
"""How a dialect renders errors."""


@dataclass(frozen=True)
class ErrorForm:
    """The bodies of a dialect's errors, and the statuses where a dialect has others."""

    body: ErrorBody
    status: Callable[[ApiError], int] = lambda error: error.status
    name: str = "Error"  # of the body's schema in the API description
    schema: Mapping[str, Any] = field(default_factory=lambda: SCHEMA)
    request_id: str | None = None  # a header that names the request, besides X-Request-Id
    statuses: tuple[int, ...] = ()  # that OpenAI's form does not have


def openai_error(error: ApiError) -> dict[str, Any]:
    """OpenAI's form, which all routes have that name no other."""
    kind = "invalid_request_error" if 400 < error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, kind),
            "param": error.param,
            "code": error.code,
            **error.more,
        }
    }


OPENAI_ERRORS = ErrorForm(openai_error)


def without_paths(text: str) -> str:
    """The text with absolute paths cut to the names of their files."""
    return _PATH.sub(r"\1", text)


@contextmanager
def in_the_words_of(wording: Wording) -> Iterator[None]:
    """What is refused within becomes an ApiError, with the names that the body's fields have."""
    try:
        yield
    except Refused as error:
        raise ApiError.of(error.renamed(wording)) from None
    except ApiError as error:
        error.rename(wording)
        raise


def of_prompt(refused: Refused, request: AnyRequest) -> Refused:
    """The same in the words of a body: what the engine calls prompt, ids or text stands in the
    field that the request was made of."""
    if not isinstance(request, EngineRequest):
        return refused
    prompt = "prompt" if request.messages is None else "messages"
    return refused.renamed(dict.fromkeys(_PROMPT, prompt))


def from_refusal(error: Exception, request: AnyRequest) -> ApiError:
    """The answer to an error of `Engine.submit` or `decide`. Raises the error again where
    these do not promise it."""
    if isinstance(error, ValueError):
        refused = copy(error) if isinstance(error, Refused) else Refused(None, str(error))
        refused.recorded = request.id
        return ApiError.of(of_prompt(refused, request))
    for kind, status, code in _REFUSALS:
        if isinstance(error, kind):
            seconds = math.ceil(error.retry_s) if isinstance(error, NotReady) else 0
            headers = {"Retry-After": str(max(RETRY_AFTER_S, seconds)), "X-Request-Id": request.id}
            if isinstance(error, EngineDead):
                headers |= GOODBYE
            answer = ApiError(status, without_paths(str(error)), code=code, headers=headers)
            answer.recorded = True
            return answer
    raise error


def from_failed(failed: Failed) -> ApiError:
    """The answer to a request that failed."""
    status = _STATUS[failed.kind]
    if status == 400:
        kind = TooLarge if failed.kind == "too_large" else Refused
        refused = failed.refused or kind(None, failed.message)
        answer = ApiError.of(refused)
        if isinstance(refused, TooLarge):
            prompt = failed.account.prompt_tokens if failed.account else None
            answer.more["n_prompt_tokens"] = prompt
        else:
            answer.code = failed.kind
    else:
        headers = dict(RETRY_LATER) if status == 503 else None
        message = without_paths(failed.message)
        answer = ApiError(status, message, code=failed.kind, headers=headers)
    answer.recorded = True
    return answer


def internal() -> ApiError:
    return ApiError(500, "the server failed; its log says why", code="internal")


# OpenAI's routes that are not here, though they look like the id of a response.
_NOT_HERE = {"/v1/responses/input_tokens", "/v1/responses/compact"}


def add_handlers(app: FastAPI) -> None:
    """Renders every failure of a route with the error form of its path."""

    async def answer(request: Request, error: Exception) -> Response:
        return _answer_to(error, app, request).response(request.scope)

    for kind in (ApiError, Refused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _answer_to(error: Exception, app: FastAPI, request: Request) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError.of(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return refusal(first["loc"][1:], first["msg"], first["type"])
    if not isinstance(error, HTTPException):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return internal()
    path, status = request.url.path, error.status_code
    headers = dict(error.headers or {})
    if status in (404, 405):
        # A request without a route reaches the page's files, which answer 404 or 405 by the
        # method alone.
        routes = [] if path in _NOT_HERE else [r for r in app.routes if isinstance(r, APIRoute)]
        matching = [route for route in routes if route.path_regex.match(path)]
        allowed = {method for route in matching for method in route.methods or ()}
        status = 405 if allowed else 404
        headers = {"Allow": ", ".join(sorted(allowed))} if allowed else {}
    messages = {
        404: f"there is no {request.method} {path[:200]}; /docs lists what there is",
        405: f"{path[:200]} takes another method",
    }
    return ApiError(status, messages.get(status, str(error.detail)), headers=headers)
