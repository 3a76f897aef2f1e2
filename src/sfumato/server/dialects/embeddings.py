"""A vector for each text: OpenAI's route, llama-server's and Ollama's.

Texts become requests for vectors, and vectors become numbers or base64."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from torch.nn.functional import normalize

from sfumato.engine import Pooling, Prompt, Request
from sfumato.media.patches import Patches
from sfumato.options.settings import POOLINGS
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat.call import LONG_INPUT, check_slot, prompts_in
from sfumato.server.chat.objects import warned
from sfumato.server.chat.pictures import prompts_read
from sfumato.server.dialects.ollama import OLLAMA_ERRORS, Tagged, nanoseconds
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Answer, Dialect, Renderer
from sfumato.server.schemas import Body, First, ModelName, Only, within, without_effect
from sfumato.server.service import Service
from sfumato.tasks.works import PlacedPicture

MOST_INPUTS = 2048
"""Texts of one body, as OpenAI's API has it."""
MOST_DIMENSIONS = 2**16  # of any network, before this one's hidden size is looked at

_Items = str | dict[str, Any] | Annotated[list[Any], First]
Input = Annotated[_Items, WithJsonSchema(schemas.EMBEDDING_INPUT)]


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
    model: ModelName = None
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


@without_effect(embd_normalize=Only(2, why=_NORMALIZED))
class LlamaEmbeddingsBody(Pooled):
    """llama-server's own embeddings."""

    input: Input | None = Field(None, description="As of /v1/embeddings.")
    content: Input | None = Field(None, description="The same as input.")
    encoding_format: Format | None = Field(None, description="As of /v1/embeddings.")


@without_effect("options keep_alive")
class OllamaEmbeddingsBody(Tagged, Pooled):
    """Ollama's embedding of one text, of its older route."""

    prompt: str = Field("", description="The text; without one the vector is empty.")


@without_effect("options keep_alive")
class OllamaEmbedBody(Tagged, Pooled):
    """Ollama's embeddings."""

    input: Annotated[
        Input, WithJsonSchema(schemas.either(schemas.EMBEDDING_INPUT, {"const": []}))
    ] = Field(description="One text, or a list of them.")
    truncate: bool | None = Field(None, description="Cut what exceeds the context (true).")


MOST_NUMBERS = 2**22
"""Numbers of one answer at most: about 12 bytes each as text, until they are sent."""


def vector_requests(
    service: Service, body: Pooled, value: Any, field: str, path: str, truncate: bool = False
) -> list[Request]:
    """One request for each text of the body's field. truncate: cut what exceeds the context. Raises
    Refused."""
    prompts = prompts_read(service, body, prompts_in(value, field, MOST_INPUTS))
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
        made = _made(service, prompt, field, path, truncate)
        requests.append(
            Request(
                ids=made.ids,
                made=made,
                max_tokens=0,
                pooling=pooling,
                timeout_s=body.timeout,
                since=body.envelope.since,
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


def _made(
    service: Service,
    prompt: str | list[int | str | Patches],
    field: str,
    path: str,
    truncate: bool,
) -> Prompt:
    """The prompt's tokens, bos in front of a text; markers in a text are text. What has pictures is
    never cut. No later prompt is likely to share one. Raises Refused."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    most, pictures = service.context, list[PlacedPicture]()
    truncate = truncate and not any(isinstance(part, Patches) for part in parts)
    if truncate:  # so many characters are more tokens than a slot has
        longest = most * service.model.tokenizer.longest_token
        parts = [part[:longest] if isinstance(part, str) else part for part in parts]
    ids = service.raw_prompt(parts, path, special=False, field=field, pictures=pictures)
    vocabulary = service.model.config.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused(field, f"token ids must lie in 0..{vocabulary - 1}")
    return Prompt(ids[:most] if truncate else ids, (), tuple(pictures))


def prompt_tokens(replies: Sequence[CollectedReply]) -> int:
    return sum(collected.finished.account.prompt_tokens for collected in replies)


class VectorRenderer(Renderer):
    """Vectors are one body; nothing is streamed."""

    def __init__(self, service: Service, body: Pooled, requests: Sequence[Request]) -> None:
        self.service, self.requests = service, requests
        self._encoding = getattr(body, "encoding_format", None)
        self._dimensions, self.warned = body.dimensions, warned(body)
        self.waited_s = body.envelope.waited_s

    def vectors(self, replies: Sequence[CollectedReply]) -> Iterator[list[float] | str]:
        """Each of length 1, as JSON has it, in as many digits as float32 has; or the bytes of
        float32, the lowest first, as base64."""
        for collected in replies:
            vector = collected.finished.vector
            assert vector is not None
            if self._dimensions not in (None, len(vector)):
                vector = normalize(vector[: self._dimensions], dim=0)
            if self._encoding == "base64":
                yield base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii")
            else:
                yield [float(f"{value:.9g}") for value in vector.tolist()]


_OPENAI_PATH = "/v1/embeddings"


class OpenAIRenderer(VectorRenderer):
    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        count = prompt_tokens(replies)
        return {
            "object": "list",
            "model": self.service.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **self.warned,
            "data": (
                {"object": "embedding", "index": number, "embedding": vector}
                for number, vector in enumerate(self.vectors(replies))
            ),
        }


OPENAI_EMBEDDINGS = Dialect(
    name="embeddings",
    path=_OPENAI_PATH,
    tag="OpenAI",
    help="A vector of length 1 for each text: its hidden states, pooled.",
    body_type=EmbeddingsBody,
    parse=lambda service, body: vector_requests(service, body, body.input, "input", _OPENAI_PATH),
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
            "load_duration": nanoseconds(self.waited_s),
            "prompt_eval_count": prompt_tokens(replies),
            **self.warned,
            "embeddings": self.vectors(replies),
        }


class OlderOllamaRenderer(VectorRenderer):
    """One vector, and nothing else but warnings."""

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        return {"embedding": next(self.vectors(replies)), **self.warned}


OLLAMA_EMBED = Dialect(
    name="ollama_embed",
    path=_OLLAMA_PATH,
    tag="Ollama",
    help="A vector of length 1 for each text, as Ollama has it.",
    body_type=OllamaEmbedBody,
    parse=lambda service, body: vector_requests(
        service, body, body.input, "input", _OLLAMA_PATH, body.truncate is not False
    ),
    renderer=OllamaRenderer,
    errors=OLLAMA_ERRORS,
    # An empty list of vectors for an empty list of texts, as Ollama has it.
    at_once=lambda service, body: (
        {"model": service.name, "embeddings": []} if body.input == [] else None
    ),
)
OLLAMA_EMBEDDINGS = Dialect(
    name="ollama_embeddings",
    path=_OLDER_PATH,
    tag="Ollama",
    help="A vector of length 1 for one text, as Ollama's older route has it.",
    body_type=OllamaEmbeddingsBody,
    parse=lambda service, body: vector_requests(
        service, body, body.prompt, "prompt", _OLDER_PATH, truncate=True
    ),
    renderer=OlderOllamaRenderer,
    errors=OLLAMA_ERRORS,
    # Clients load a model so.
    at_once=lambda service, body: None if body.prompt else {"embedding": []},
)
