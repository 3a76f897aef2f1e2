"""llama-server's embeddings: POST /embeddings, and the same at /embedding."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server.dialects.llama_cpp.slot import EMBEDDING, check_slot
from sfumato.server.dialects.shared.vectors import VectorRenderer, requests_of
from sfumato.server.http.dialect import Answer, Dialect
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.embeddings import LlamaEmbeddingsBody
from sfumato.server.service import Service

PATH = "/embeddings"


class EmbeddingsRenderer(VectorRenderer):
    """A list, in which each vector is the only one of its text."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return ({"index": i, "embedding": [v]} for i, v in enumerate(self.vectors(replies)))


def parse(service: Service, body: LlamaEmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    if (body.input is None) == (body.content is None):
        raise Refused(("input", "content"), "give exactly one of them")
    field = "input" if body.content is None else "content"
    requests = requests_of(service, body, getattr(body, field), field, PATH)
    for request in requests:
        check_slot(service, len(request.ids or ()), EMBEDDING, field)
    return requests


LLAMA_EMBEDDINGS = Dialect(
    name="llama_embeddings",
    path=PATH,
    aliases=("/embedding",),
    tag="llama-server",
    help="A vector of length 1 for each text, as llama-server has it.",
    body_type=LlamaEmbeddingsBody,
    parse=parse,
    renderer=EmbeddingsRenderer,
)
