"""The bodies of fills: a text with holes, and llama-server's text before a suffix."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import First, Ids, Objects
from sfumato.server.schemas.generation import Sampling
from sfumato.server.schemas.llama_cpp import LlamaSampling, Predict
from sfumato.server.schemas.neutral import Only

MOST_EXTRA = 256  # texts beside the one that is filled in

_Parts = Annotated[list[str | dict[str, Any]], First]


class FillBody(Sampling):
    """A text with holes, which are filled."""

    parts: Annotated[_Parts, WithJsonSchema(json_schemas.PARTS)] = Field(
        description='Texts and holes: {"tokens": 6}, {"at_most": 8} or {"choices": ["a", "b"]}.'
    )
    messages: Annotated[Objects | None, WithJsonSchema(json_schemas.MESSAGES_OR_NULL)] = Field(
        None, min_length=1, description="A conversation that the text is the complete reply to."
    )
    prompt: Annotated[
        str | Annotated[Ids, Field(min_length=1)] | None,
        WithJsonSchema(json_schemas.PROMPT_OR_NULL),
    ] = Field(None, description="What comes before the text, as it is; not with messages.")
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")


class InfillBody(LlamaSampling):
    """llama-server's text between a prefix and a suffix."""

    input_prefix: str = Field("", description="The text before the gap.")
    input_suffix: str = Field("", description="The text after it.")
    input_extra: Annotated[
        Objects | None, Field(max_length=MOST_EXTRA), WithJsonSchema(json_schemas.EXTRA)
    ] = Field(None, description="Other texts: filename and text; they come first.")
    prompt: str | None = Field(None, description="Beginning of the text in the gap.")
    n_predict: Predict = None
    n_probs: Annotated[Any, Only(0, why="use /completion")] = None
