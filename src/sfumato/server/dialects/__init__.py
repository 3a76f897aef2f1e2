"""HTTP APIs, a file or a package each: how bodies are parsed and replies rendered.

To add one, write a file with a `Dialect` (http/route.py) and list the value here. Typed decisions
have dialects and routes of their own, which the package `decisions` lists. Errors before a
body is read (wrong keys, large bodies, no route) have the form of their path: to give the paths of
an API its form, add a line to `PREFIXES`; a route's dialect needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi.datastructures import Headers

from sfumato.server.dialects.anthropic import ANTHROPIC_ERRORS, MESSAGES
from sfumato.server.dialects.decisions import DecisionRoute
from sfumato.server.dialects.decisions.forms import ROUTES
from sfumato.server.dialects.embeddings import (
    LLAMA_EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OPENAI_EMBEDDINGS,
)
from sfumato.server.dialects.fill import FILL
from sfumato.server.dialects.llama_cpp import INFILL, LLAMA_COMPLETION
from sfumato.server.dialects.ollama import OLLAMA_CHAT, OLLAMA_ERRORS, OLLAMA_GENERATE
from sfumato.server.dialects.openai_chat import OPENAI_CHAT
from sfumato.server.dialects.openai_completions import OPENAI_COMPLETIONS
from sfumato.server.dialects.responses.renderer import RESPONSES
from sfumato.server.http.errors import OPENAI_ERRORS, ErrorForm
from sfumato.server.http.middleware import FormOf
from sfumato.server.http.route import Dialect, Post

DIALECTS: tuple[Dialect[Any], ...] = (
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    RESPONSES,
    LLAMA_COMPLETION,
    INFILL,
    FILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPENAI_EMBEDDINGS,
    LLAMA_EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
)
DECISIONS: tuple[DecisionRoute, ...] = ROUTES

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
"""The form of errors by the prefix of a path; the prefix of most parts counts: "/api" is that of
"/api" and "/api/chat", and not of "/apis". A path without one has OpenAI's form."""


def by_path(posts: Sequence[Post[Any]], decisions: Sequence[DecisionRoute]) -> FormOf:
    """The form of errors of a canonical path and a request's headers."""
    forms = dict(PREFIXES)
    for post in posts:
        forms |= dict.fromkeys((post.path, *post.aliases), post.errors)
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
