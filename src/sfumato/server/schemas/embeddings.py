"""The bodies of the routes that give a vector for each text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from sfumato.options.kinds import POOLINGS
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First
from sfumato.server.schemas.neutral import Ignored, Only
from sfumato.server.schemas.settings import within

MOST_INPUTS = 2048
"""Texts of one body, as OpenAI's API has it."""
MOST_DIMENSIONS = 2**16  # of any network, before this one's hidden size is looked at

_Items = str | dict[str, Any] | Annotated[list[Any], First]
Input = Annotated[_Items, WithJsonSchema(json_schemas.EMBEDDING_INPUT)]


def _check_pooling(value: str | None) -> str | None:
    """Of texts that are empty, too, for which nothing is pooled. Raises PydanticCustomError."""
    if value is not None and value not in POOLINGS:
        words = " or ".join(map(repr, POOLINGS))
        raise PydanticCustomError("pooling", f"must be {words}, got {value[:40]!r}")
    return value


Pooling = Annotated[
    str | None, AfterValidator(_check_pooling), WithJsonSchema({"enum": [*POOLINGS, None]})
]
Format = Literal["float", "base64"]
_NORMALIZED = "vectors have length 1 here; leave it out"


class Pooled(Body):
    """What the routes share."""

    pooling: Pooling = Field(
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
