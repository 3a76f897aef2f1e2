"""OpenAI's embeddings: POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sfumato.engine import Request
from sfumato.server.dialects.shared.vectors import VectorRenderer, prompt_tokens, requests_of
from sfumato.server.http.dialect import Answer, Dialect
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.embeddings import EmbeddingsBody
from sfumato.server.service import Service

PATH = "/v1/embeddings"


class EmbeddingsRenderer(VectorRenderer):
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        count = prompt_tokens(replies)
        return {
            "object": "list",
            "model": self.service.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **self.warned,
            "data": self._data(replies),
        }

    def _data(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, vector in enumerate(self.vectors(replies)):
            yield {"object": "embedding", "index": number, "embedding": vector}


def parse(service: Service, body: EmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    return requests_of(service, body, body.input, "input", PATH)


OPENAI_EMBEDDINGS = Dialect(
    name="embeddings",
    path=PATH,
    tag="OpenAI",
    help="A vector of length 1 for each text: its hidden states, pooled.",
    body_type=EmbeddingsBody,
    parse=parse,
    renderer=EmbeddingsRenderer,
)
