"""How errors are rendered on each path before a body is read: wrong keys, large bodies, no route.

One table of prefixes, and the routes' own forms. To give the paths of an API its form of errors,
add a line to `PREFIXES`; a route's dialect needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi.datastructures import Headers

from sfumato.server.dialects.anthropic.errors import ANTHROPIC_ERRORS
from sfumato.server.dialects.ollama.errors import OLLAMA_ERRORS
from sfumato.server.http.decision_route import DecisionRoute
from sfumato.server.http.dialect import Dialect
from sfumato.server.http.errors import OPENAI_ERRORS, ErrorForm
from sfumato.server.http.security import FormOf

FormByHeaders = Callable[[Headers], ErrorForm]


def _of_models(headers: Headers) -> ErrorForm:
    """A route of several APIs; Anthropic's clients say that they are."""
    return ANTHROPIC_ERRORS if "anthropic-version" in headers else OPENAI_ERRORS


PREFIXES: Mapping[str, ErrorForm | FormByHeaders] = {
    "/v1": OPENAI_ERRORS,
    "/v1/messages": ANTHROPIC_ERRORS,
    "/v1/models": _of_models,
    "/api": OLLAMA_ERRORS,
}
"""Of a path, the prefix of most parts counts: "/api" is that of "/api" and "/api/chat", and not of
"/apis". A path without one has OpenAI's form."""


def by_path(dialects: Sequence[Dialect[Any]], decisions: Sequence[DecisionRoute]) -> FormOf:
    """The form of errors of a canonical path and a request's headers."""
    forms = dict(PREFIXES)
    for dialect in dialects:
        forms |= dict.fromkeys((dialect.path, *dialect.aliases), dialect.errors)
    for route in decisions:
        forms[route.path] = _form_of(route)

    def form_of(path: str, headers: Headers) -> ErrorForm:
        while path not in forms and path:
            path = path.rpartition("/")[0]
        form = forms.get(path, OPENAI_ERRORS)
        return form if isinstance(form, ErrorForm) else form(headers)

    return form_of


def _form_of(route: DecisionRoute) -> FormByHeaders:
    return lambda headers: route.by_headers(headers).errors
