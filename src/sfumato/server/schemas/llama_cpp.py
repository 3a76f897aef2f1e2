"""The bodies of llama-server's own routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First, Ids
from sfumato.server.schemas.generation import (
    Continue,
    MaxTokens,
    Messages,
    Sampling,
    TemplateKwargs,
    Tools,
)
from sfumato.server.schemas.neutral import Ignored, Only

_Paths = Annotated[
    list[Annotated[str, Field(max_length=100)]], First, Field(max_length=64), AfterValidator(tuple)
]


class LlamaSampling(Sampling):
    """What llama-server has on each of its routes that generate."""

    id_slot: Ignored = None
    n_keep: Ignored = None
    typical_p: Annotated[Any, Only(1, why="is not supported; use top_p")] = None
    repeat_penalty: Annotated[Any, Only(1, why="penalties are not supported")] = None
    repeat_last_n: Ignored = None
    mirostat: Annotated[Any, Only(0, why="is not supported")] = None
    n_probs: Annotated[Any, Only(0, why="use /v1/completions with logprobs")] = None
    response_fields: _Paths | None = Field(
        None, description='Only these fields of the answer: "content", "timings/predicted_n".'
    )


class LlamaBody(LlamaSampling):
    """llama-server's own completion. What it has and we have not is refused unless neutral."""

    prompt: Annotated[str | Ids, WithJsonSchema(json_schemas.PROMPT)]
    n_predict: MaxTokens = Field(None, description="Tokens at most; -1: what fits.")


class TokenizeBody(Body):
    """llama-server's, with a content, or vLLM's, with a prompt."""

    content: str | None = None
    prompt: str | None = Field(None, description="The same as content.")
    add_special: bool | None = Field(None, description="Put bos in front (false).")
    add_special_tokens: bool | None = Field(None, description="The same as add_special.")
    parse_special: bool | None = Field(None, description="Read markers as their tokens (true).")
    with_pieces: bool | None = Field(None, description="Answer objects with id and piece (false).")
    model: Ignored = None


class DetokenizeBody(Body):
    tokens: Annotated[Ids, WithJsonSchema(json_schemas.IDS)]
    model: Ignored = None


class TemplateBody(Body):
    messages: Messages = Field(min_length=1)
    tools: Tools = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="Open the model's turn (true).")
    continue_final_message: Continue = None
