"""Ollama's embeddings: POST /api/embed, and POST /api/embeddings, its older route."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.engine import Request
from sfumato.server.dialects.ollama.errors import OLLAMA_ERRORS
from sfumato.server.dialects.ollama.times import nanoseconds
from sfumato.server.dialects.shared.vectors import VectorRenderer, prompt_tokens, requests_of
from sfumato.server.http.dialect import Answer, Dialect, Frame
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.embeddings import OllamaEmbedBody, OllamaEmbeddingsBody
from sfumato.server.service import Service

PATH, OLDER_PATH = "/api/embed", "/api/embeddings"


class EmbedRenderer(VectorRenderer):
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        since = min(each.since or 0.0 for each in self.requests)
        return {
            "model": self.service.name,
            "total_duration": nanoseconds(self.service.engine.now() - since),
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens(replies),
            **self.warned,
            "embeddings": self.vectors(replies),
        }


class OlderRenderer(VectorRenderer):
    """One vector, and nothing else but warnings."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return {"embedding": next(self.vectors(replies)), **self.warned}


def _parse(service: Service, body: OllamaEmbedBody) -> list[Request]:
    """Raises Refused."""
    truncate = body.truncate is not False
    return requests_of(service, body, body.input, "input", PATH, truncate)


def _parse_older(service: Service, body: OllamaEmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    return requests_of(service, body, body.prompt, "prompt", OLDER_PATH, truncate=True)


def _of_no_text(service: Service, body: OllamaEmbeddingsBody) -> Frame | None:
    """Clients load a model so."""
    return None if body.prompt else {"embedding": []}


def _of_no_texts(service: Service, body: OllamaEmbedBody) -> Frame | None:
    """An empty list of vectors for an empty list of texts, as Ollama has it."""
    return {"model": service.name, "embeddings": []} if body.input == [] else None


OLLAMA_EMBED = Dialect(
    name="ollama_embed",
    path=PATH,
    tag="Ollama",
    help="A vector of length 1 for each text, as Ollama has it.",
    body_type=OllamaEmbedBody,
    parse=_parse,
    renderer=EmbedRenderer,
    errors=OLLAMA_ERRORS,
    at_once=_of_no_texts,
)
OLLAMA_EMBEDDINGS = Dialect(
    name="ollama_embeddings",
    path=OLDER_PATH,
    tag="Ollama",
    help="A vector of length 1 for one text, as Ollama's older route has it.",
    body_type=OllamaEmbeddingsBody,
    parse=_parse_older,
    renderer=OlderRenderer,
    errors=OLLAMA_ERRORS,
    at_once=_of_no_text,
)
