"""A vector for each text: OpenAI's route, llama-server's and Ollama's.

Texts become requests for vectors, and vectors become numbers or base64."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from torch import Tensor
from torch.nn.functional import normalize

from sfumato.engine import Finished, Pooling, Prompt, Request, Settled
from sfumato.options.settings import POOLINGS
from sfumato.refused import Refused
from sfumato.server.chat.objects import warned
from sfumato.server.chat.prompts import LONG_INPUT, MixedPrompt, check_slot, prompts_in
from sfumato.server.dialects.ollama.forms import OLLAMA_ERRORS, nanoseconds
from sfumato.server.http.dialect import Answer, Dialect, Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First, Ignored, Only
from sfumato.server.schemas.json_schemas import within
from sfumato.server.service import Service

MOST_INPUTS = 2048
"""Texts of one body, as OpenAI's API has it."""
MOST_DIMENSIONS = 2**16  # of any network, before this one's hidden size is looked at

_Items = str | dict[str, Any] | Annotated[list[Any], First]
Input = Annotated[_Items, WithJsonSchema(json_schemas.EMBEDDING_INPUT)]


def _check_pooling(value: str | None) -> str | None:
    """Checks the pooling, for empty texts too, for which nothing is pooled. Raises
    PydanticCustomError."""
    if value is not None and value not in POOLINGS:
        words = " or ".join(map(repr, POOLINGS))
        raise PydanticCustomError("pooling", f"must be {words}, got {value[:40]!r}")
    return value


PoolingName = Annotated[
    str | None, AfterValidator(_check_pooling), WithJsonSchema({"enum": [*POOLINGS, None]})
]
Format = Literal["float", "base64"]
_NORMALIZED = "vectors have length 1 here; leave it out"


class Pooled(Body):
    """What the routes share."""

    pooling: PoolingName = Field(
        None, description='"mean": of all tokens; "last": the last one; null: the server\'s.'
    )
    timeout: Annotated[float | None, within("timeout_s")] = None
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")
    dimensions: int | None = Field(
        None, ge=1, le=MOST_DIMENSIONS, description="The first ones alone, of length 1 again."
    )


class EmbeddingsBody(Pooled):
    """OpenAI's embeddings."""

    input: Input = Field(description="One text, or a list of them; token ids in place of a text.")
    encoding_format: Format | None = Field(
        None, description="base64: of float32, the lowest byte first."
    )


class LlamaEmbeddingsBody(Pooled):
    """llama-server's own embeddings."""

    input: Input | None = Field(None, description="As of /v1/embeddings.")
    content: Input | None = Field(None, description="The same as input.")
    encoding_format: Format | None = Field(None, description="As of /v1/embeddings.")
    embd_normalize: Annotated[Any, Only(2, why=_NORMALIZED)] = None


class OllamaEmbeddingsBody(Pooled):
    """Ollama's embedding of one text, of its older route."""

    prompt: str = Field("", description="The text; without one the vector is empty.")
    options: Ignored = None
    keep_alive: Ignored = None


class OllamaEmbedBody(Pooled):
    """Ollama's embeddings."""

    input: Annotated[Input, WithJsonSchema(json_schemas.EMBEDDING_INPUT_OR_NONE)] = Field(
        description="One text, or a list of them."
    )
    truncate: bool | None = Field(None, description="Cut what exceeds the context (true).")
    options: Ignored = None
    keep_alive: Ignored = None


MOST_NUMBERS = 2**22
"""Numbers of one answer at most: about 12 bytes each as text, until they are sent."""


def vector_requests(
    service: Service, body: Pooled, value: Any, field: str, path: str, truncate: bool = False
) -> list[Request]:
    """One request for each text of the body's field. truncate: cut what exceeds the context. Raises
    Refused."""
    prompts, _ = prompts_in(value, field, MOST_INPUTS)
    size = _size(service, body)
    if len(prompts) * size > MOST_NUMBERS:
        raise Refused(
            field,
            f"{len(prompts):,} vectors of {size:,} numbers are over {MOST_NUMBERS:,} "
            "numbers, the most of one answer",
            "send the texts in parts",
        )
    pooling = Pooling(body.pooling or service.settings.pooling)
    requests = []
    for prompt in prompts:
        ids = _ids(service, prompt, field, truncate)
        requests.append(
            Request(
                ids=ids,
                made=Prompt(ids, ()),  # no later prompt is likely to share it
                max_tokens=0,
                pooling=pooling,
                timeout_s=body.timeout,
                since=body.since,
                endpoint=path,
                user=body.user,
            )
        )
    return requests


def _size(service: Service, body: Pooled) -> int:
    """Numbers of a vector. Raises Refused."""
    hidden = service.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > hidden:
        raise Refused(
            "dimensions",
            f"must be at most {hidden}, the vectors of this model",
            f"got {body.dimensions}",
        )
    return body.dimensions or hidden


def _ids(service: Service, prompt: MixedPrompt, field: str, truncate: bool) -> list[int]:
    """The prompt's tokens, bos in front of a text; markers in a text are text. Raises Refused."""
    tokenizer, context = service.model.tokenizer, service.context
    parts = [prompt] if isinstance(prompt, str) else prompt
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        # So many characters are more tokens than a slot has.
        text = part[: context * tokenizer.longest_token] if truncate else part
        ids += service.encode(text, field, special=False)
    if parts and isinstance(parts[0], str) and tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    vocabulary = service.model.config.vocab_size
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        what = f"token ids must lie in 0..{vocabulary - 1}" if ids else "a text is empty"
        raise Refused(field, what)
    return ids[:context] if truncate else ids


def vector_of(end: Finished, dimensions: int | None) -> Tensor:
    """float32 [numbers] of length 1."""
    assert end.vector is not None
    if dimensions is None or dimensions == len(end.vector):
        return end.vector
    return normalize(end.vector[:dimensions], dim=0)


def numbers(vector: Tensor, encoding: str | None = None) -> list[float] | str:
    """Numbers as JSON has them, in as many digits as float32 has; or the bytes of float32, the
    lowest first, as base64."""
    if encoding == "base64":
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii")
    return [float(f"{value:.9g}") for value in vector.tolist()]


def prompt_tokens(replies: Sequence[CollectedReply]) -> int:
    return sum(collected.finished.account.prompt_tokens for collected in replies)


class VectorRenderer(Renderer):
    """Vectors are one body; nothing is streamed."""

    def __init__(self, service: Service, body: Pooled, requests: Sequence[Request]) -> None:
        self.service, self.requests = service, requests
        self._encoding = getattr(body, "encoding_format", None)
        self._dimensions, self.warned = body.dimensions, warned(body)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        return ()

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        return ()

    def vectors(self, replies: Sequence[CollectedReply]) -> Iterator[list[float] | str]:
        """The vectors as they are sent, each of length 1."""
        for collected in replies:
            yield numbers(vector_of(collected.finished, self._dimensions), self._encoding)


_OPENAI_PATH = "/v1/embeddings"


class OpenAIRenderer(VectorRenderer):
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


def _parse_openai(service: Service, body: EmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    return vector_requests(service, body, body.input, "input", _OPENAI_PATH)


OPENAI_EMBEDDINGS = Dialect(
    name="embeddings",
    path=_OPENAI_PATH,
    tag="OpenAI",
    help="A vector of length 1 for each text: its hidden states, pooled.",
    body_type=EmbeddingsBody,
    parse=_parse_openai,
    renderer=OpenAIRenderer,
)

_LLAMA_PATH = "/embeddings"


class LlamaRenderer(VectorRenderer):
    """A list, in which each vector is the only one of its text."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return ({"index": i, "embedding": [v]} for i, v in enumerate(self.vectors(replies)))


def _parse_llama(service: Service, body: LlamaEmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    if (body.input is None) == (body.content is None):
        raise Refused(("input", "content"), "give exactly one of them")
    field = "input" if body.content is None else "content"
    requests = vector_requests(service, body, getattr(body, field), field, _LLAMA_PATH)
    for request in requests:
        check_slot(service, len(request.ids or ()), LONG_INPUT, field)
    return requests


LLAMA_EMBEDDINGS = Dialect(
    name="llama_embeddings",
    path=_LLAMA_PATH,
    aliases=("/embedding",),
    tag="llama-server",
    help="A vector of length 1 for each text, as llama-server has it.",
    body_type=LlamaEmbeddingsBody,
    parse=_parse_llama,
    renderer=LlamaRenderer,
)

_OLLAMA_PATH, _OLDER_PATH = "/api/embed", "/api/embeddings"


class OllamaRenderer(VectorRenderer):
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


class OlderOllamaRenderer(VectorRenderer):
    """One vector, and nothing else but warnings."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return {"embedding": next(self.vectors(replies)), **self.warned}


def _parse_ollama(service: Service, body: OllamaEmbedBody) -> list[Request]:
    """Raises Refused."""
    truncate = body.truncate is not False
    return vector_requests(service, body, body.input, "input", _OLLAMA_PATH, truncate)


def _parse_older(service: Service, body: OllamaEmbeddingsBody) -> list[Request]:
    """Raises Refused."""
    return vector_requests(service, body, body.prompt, "prompt", _OLDER_PATH, truncate=True)


def _of_no_text(service: Service, body: OllamaEmbeddingsBody) -> Frame | None:
    """Clients load a model so."""
    return None if body.prompt else {"embedding": []}


def _of_no_texts(service: Service, body: OllamaEmbedBody) -> Frame | None:
    """An empty list of vectors for an empty list of texts, as Ollama has it."""
    return {"model": service.name, "embeddings": []} if body.input == [] else None


OLLAMA_EMBED = Dialect(
    name="ollama_embed",
    path=_OLLAMA_PATH,
    tag="Ollama",
    help="A vector of length 1 for each text, as Ollama has it.",
    body_type=OllamaEmbedBody,
    parse=_parse_ollama,
    renderer=OllamaRenderer,
    errors=OLLAMA_ERRORS,
    at_once=_of_no_texts,
)
OLLAMA_EMBEDDINGS = Dialect(
    name="ollama_embeddings",
    path=_OLDER_PATH,
    tag="Ollama",
    help="A vector of length 1 for one text, as Ollama's older route has it.",
    body_type=OllamaEmbeddingsBody,
    parse=_parse_older,
    renderer=OlderOllamaRenderer,
    errors=OLLAMA_ERRORS,
    at_once=_of_no_text,
)
