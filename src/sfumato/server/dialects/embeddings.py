"""Vectors of texts: OpenAI's /v1/embeddings, llama-server's /embeddings, Ollama's two routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sfumato.engine import Finished, Request, Settled
from sfumato.server.dialects.ollama.errors import OLLAMA_ERRORS
from sfumato.server.dialects.shared.openai_objects import warned
from sfumato.server.dialects.shared.vectors import numbers, prompt_tokens, requests_of, vectors
from sfumato.server.http.dialect import Answer, Dialect, Frame, Renderer
from sfumato.server.http.errors import bad_request
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.body import Body
from sfumato.server.schemas.embeddings import (
    EmbeddingsBody,
    LlamaEmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    Pooled,
)
from sfumato.server.service import Service

OPENAI, LLAMA = "/v1/embeddings", "/embeddings"
OLLAMA, OLLAMA_OLDER = "/api/embed", "/api/embeddings"


class _VectorRenderer(Renderer):
    """Vectors are one body; nothing is streamed."""

    def __init__(self, service: Service, body: Pooled, requests: Sequence[Request]) -> None:
        self._service, self._requests = service, requests
        self._encoding = getattr(body, "encoding_format", None)
        self._dimensions, self._warned = body.dimensions, warned(body)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        return ()

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        return ()

    def _vectors(self, replies: Sequence[CollectedReply]) -> Iterator[list[float] | str]:
        for vector in vectors(replies, self._dimensions):
            yield numbers(vector, self._encoding)


class OpenAIRenderer(_VectorRenderer):
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        count = prompt_tokens(replies)
        return {
            "object": "list",
            "model": self._service.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **self._warned,
            "data": self._data(replies),
        }

    def _data(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, vector in enumerate(self._vectors(replies)):
            yield {"object": "embedding", "index": number, "embedding": vector}


class LlamaRenderer(_VectorRenderer):
    """A list, in which each vector is the only one of its text."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return ({"index": i, "embedding": [v]} for i, v in enumerate(self._vectors(replies)))


class OllamaRenderer(_VectorRenderer):
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        since = min(each.since or 0.0 for each in self._requests)
        return {
            "model": self._service.name,
            "total_duration": _ns(self._service.engine.now() - since),
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens(replies),
            **self._warned,
            "embeddings": self._vectors(replies),
        }


class OllamaOlderRenderer(_VectorRenderer):
    """One vector, and nothing else but warnings."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return {"embedding": next(self._vectors(replies)), **self._warned}


def _ns(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def _openai(service: Service, body: EmbeddingsBody) -> list[Request]:
    """Raises ApiError."""
    return requests_of(service, body, body.input, "input", OPENAI)


def _llama(service: Service, body: LlamaEmbeddingsBody) -> list[Request]:
    """Raises ApiError."""
    if (body.input is None) == (body.content is None):
        raise bad_request("input, content: give exactly one of them", "input")
    field = "input" if body.content is None else "content"
    return requests_of(service, body, getattr(body, field), field, LLAMA)


def _ollama(service: Service, body: OllamaEmbedBody) -> list[Request]:
    """Raises ApiError."""
    truncate = body.truncate is not False
    return requests_of(service, body, body.input, "input", OLLAMA, truncate)


def _ollama_older(service: Service, body: OllamaEmbeddingsBody) -> list[Request]:
    """Raises ApiError."""
    return requests_of(service, body, body.prompt, "prompt", OLLAMA_OLDER, truncate=True)


def _of_no_text(service: Service, body: OllamaEmbeddingsBody) -> Frame | None:
    """Clients load a model so."""
    return None if body.prompt else {"embedding": []}


def _never(body: Body) -> bool:
    return False


OPENAI_EMBEDDINGS = Dialect(
    name="embeddings",
    path=OPENAI,
    tag="OpenAI",
    help="A vector of length 1 for each text: its hidden states, pooled.",
    body_type=EmbeddingsBody,
    parse=_openai,
    renderer=OpenAIRenderer,
    streams=_never,
)
LLAMA_EMBEDDINGS = Dialect(
    name="llama_embeddings",
    path=LLAMA,
    aliases=("/embedding",),
    tag="llama-server",
    help="A vector of length 1 for each text, as llama-server has it.",
    body_type=LlamaEmbeddingsBody,
    parse=_llama,
    renderer=LlamaRenderer,
    streams=_never,
)
OLLAMA_EMBED = Dialect(
    name="ollama_embed",
    path=OLLAMA,
    tag="Ollama",
    help="A vector of length 1 for each text, as Ollama has it.",
    body_type=OllamaEmbedBody,
    parse=_ollama,
    renderer=OllamaRenderer,
    streams=_never,
    errors=OLLAMA_ERRORS,
)
OLLAMA_EMBEDDINGS = Dialect(
    name="ollama_embeddings",
    path=OLLAMA_OLDER,
    tag="Ollama",
    help="A vector of length 1 for one text, as Ollama's older route has it.",
    body_type=OllamaEmbeddingsBody,
    parse=_ollama_older,
    renderer=OllamaOlderRenderer,
    streams=_never,
    errors=OLLAMA_ERRORS,
    at_once=_of_no_text,
)
