"""The fields that bodies share which ask for a reply: sampling, grammars, lengths, messages, tools.

A field is honoured, or refused but for the values that ask for nothing (`Only`), or ignored
(`Ignored`). All routes that generate take the fields of `Neutral` and `Grammars`, and a body has
one grammar at most. What the description cannot say stands in openapi.py. Ranges that depend on the
model are the engine's business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from sfumato.diffusion.constraints.grammar import LONGEST_SOURCE, MOST_CHOICES
from sfumato.diffusion.sampler_config import MOST_NAMED
from sfumato.options.limits import MOST_TOKENS
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import (
    AtTheEnd,
    Body,
    First,
    Ignored,
    Objects,
    Only,
    Texts,
    at_most,
)
from sfumato.server.schemas.json_schemas import NULL, Schema, either, within

_TOP_P = "is not supported; use top_p"
_CANVAS = "is a field of /v1/completions and /v1/chat/completions"
_PENALTY = "penalties are not supported: the tokens of a canvas are drawn together"


class Neutral(BaseModel):
    """Fields that clients send to every route that generates, at values that ask for nothing."""

    # vLLM's
    min_p: Annotated[Any, Only(0, why=_TOP_P)] = None
    repetition_penalty: Annotated[Any, Only(1, why=_PENALTY)] = None
    length_penalty: Annotated[Any, Only(1, why="there is no beam search here")] = None
    use_beam_search: Annotated[Any, Only(False, why="there is no beam search here")] = None
    best_of: Annotated[Any, Only(1, why="is not supported; ask for n replies and choose")] = None
    skip_special_tokens: Annotated[
        Any, Only(True, why="markers are never part of a reply's text")
    ] = None
    frequency_penalty: Annotated[Any, Only(0, why=_PENALTY)] = None
    presence_penalty: Annotated[Any, Only(0, why=_PENALTY)] = None
    vllm_xargs: Annotated[Any, Only({}, why=_CANVAS)] = None
    logprob_token_ids: Annotated[Any, Only([], why=_CANVAS)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False, why=_CANVAS)] = None
    prompt_logprobs: Annotated[Any, Only(why="is a field of /v1/completions")] = None
    # llama-server's
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    timings_per_token: AtTheEnd = None
    return_progress: bool | None = Field(
        None,
        description="Send how far the prompt is encoded: streams of chats, responses, /completion.",
    )


_OBJECT: Schema = {"type": "object"}
_SCHEMA = either(_OBJECT, {"type": "boolean"})
JsonSchema = Annotated[dict[str, Any] | bool, WithJsonSchema(_SCHEMA)]
SchemaOrText = Annotated[
    dict[str, Any] | bool | str | None,
    WithJsonSchema(either(*_SCHEMA["anyOf"], {"type": "string"}, NULL)),
]
Grammar = Annotated[str, Field(max_length=LONGEST_SOURCE)]
Choices = Annotated[list[str], First, Field(min_length=1, max_length=MOST_CHOICES)]
_WHITE_SPACE = "cannot be set: white space is bounded here"


class NamedSchema(Body):
    """OpenAI's `json_schema`."""

    name: str | None = Field(None, description="Accepted and ignored.")
    description: Ignored = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="None: any object.")
    strict: bool | None = Field(None, description="The schema is held whether or not it is true.")


class ResponseFormat(Body):
    """What the reply has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="Of a json_object, as llama-server has it."
    )


class StructuredOutputs(Body):
    """vLLM's; one of them."""

    json_: SchemaOrText = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="GBNF or Lark.")
    json_object: bool | None = None
    disable_any_whitespace: Annotated[Any, Only(False, why=_WHITE_SPACE)] = None
    disable_additional_properties: Annotated[
        Any, Only(False, why="is not supported; set additionalProperties in the schema")
    ] = None
    disable_fallback: Ignored = None
    whitespace_pattern: Annotated[Any, Only(why=_WHITE_SPACE)] = None
    structural_tag: Annotated[Any, Only(why="is not supported; use tools with strict")] = None


class Grammars(BaseModel):
    """Fields of every body that asks for a reply."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = Field(None, description="The same as structured_outputs.json.")
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Annotated[Any, Only(why=_WHITE_SPACE)] = None
    json_schema: JsonSchema | None = Field(None, description="As llama-server has it.")
    grammar: Grammar | None = Field(None, description="GBNF or Lark; an empty one is none.")


LONGEST_CANVAS = 4096
"""Tokens and positions in a body at most, before the checkpoint's canvas length is looked at."""

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Canvas = Annotated[list[Token], First, Field(max_length=LONGEST_CANVAS)]
_CONSTRAINED = "is not supported; leave it out: the probabilities are the same"
NamedTokens = Annotated[list[Token], First, Field(max_length=MOST_NAMED)]


class VllmXargs(Body):
    """What vLLM's `vllm_xargs` has for diffusion models."""

    diffusion_seed_canvas: _Canvas | None = Field(
        None, description="What the first canvas begins as: a token for each of its positions."
    )
    diffusion_pinned: _Canvas | None = Field(
        None, description="Positions that keep their token of the seed canvas at every step."
    )
    diffusion_canvas_length: int | None = Field(
        None, ge=1, le=LONGEST_CANVAS, description="The same as canvas_length."
    )
    diffusion_max_steps: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Steps per canvas at most; the server's if fewer."
    )
    diffusion_read_only: bool | Literal[0, 1] | None = Field(
        None,
        description="Read the canvas and write no reply: the most probable token of each "
        "position after the last step, log probabilities at temperature 1.",
    )
    diffusion_constrained: Annotated[Any, Only(False, 0, why=_CONSTRAINED)] = None


class Sampling(Neutral, Grammars, Body):
    """How a reply is sampled and sent; null means the checkpoint's default.

    The table of settings describes the fields. A description here is a note for HTTP alone.
    """

    temperature: float | None = None
    top_p: float | None = Field(None, description="At 0 the most probable token.")
    top_k: Annotated[int | None, within("top_k")] = Field(None, description="0 and -1: all.")
    seed: Annotated[int | None, within("seed")] = Field(
        None, description="A negative one too, as in OpenAI's API."
    )
    stop: Annotated[str | Texts | None, WithJsonSchema(json_schemas.STOP)] = Field(
        None, description="An empty text is none."
    )
    logit_bias: Annotated[
        dict[str, float] | None,
        at_most(json_schemas.MOST_BIASES),
        WithJsonSchema(json_schemas.BIAS),
    ] = Field(None, description="-100 bans a token.")
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    mode: Annotated[str | None, WithJsonSchema(json_schemas.MODE)] = None
    max_steps: int | None = None
    sampler: Annotated[str | None, WithJsonSchema(json_schemas.SAMPLER)] = None
    entropy_bound: float | None = None
    count: int | None = None
    threshold: float | None = None
    margin: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability: int | None = None
    confidence: float | None = None
    settle_at_end: bool | None = None
    canvas_length: int | None = None
    self_conditioning: bool | None = None
    soft_skip: float | None = None
    soft_top_k: Annotated[int | None, within("soft_top_k")] = None
    max_thinking_tokens: Annotated[int | None, within("max_thinking_tokens")] = None
    retry_empty: bool | None = None
    timeout: Annotated[float | None, within("timeout_s")] = None
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_drafts: bool | None = Field(None, description="Also a frame for every settled canvas.")


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for what fits")
    return value


MaxTokens = Annotated[
    int | None,
    Field(ge=-1, le=MOST_TOKENS),
    AfterValidator(_not_zero),
    WithJsonSchema(json_schemas.MAX_TOKENS),
]
Messages = Annotated[Objects, WithJsonSchema(json_schemas.MESSAGES)]
Tools = Annotated[Objects | None, WithJsonSchema(json_schemas.TOOLS)]
Continue = Annotated[
    bool | None,
    Field(description="Continue the last message, an assistant's; null: where it is one."),
]
AddPrompt = Annotated[
    bool | None, Field(description="False: only where the last message is continued.")
]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send usage in a chunk of its own.")
    include_obfuscation: Ignored = None
    continuous_usage_stats: AtTheEnd = None


class TemplateKwargs(Body):
    enable_thinking: bool | None = Field(None, description="Let the model think first.")


class Generation(Sampling):
    """What chat and text completions share."""

    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    max_tokens: MaxTokens = Field(None, description="Visible tokens at most; -1: what fits.")
    n_predict: MaxTokens = Field(None, description="llama-server's name of max_tokens.")
    n: int | None = Field(None, ge=1, description="Replies; the i-th has the seed plus i.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")
    vllm_xargs: VllmXargs | None = Field(None, description="A canvas that the client gives.")
    logprob_token_ids: NamedTokens | None = Field(
        None, description="Tokens whose log probabilities are named at every position."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens "token_id:5" in log probabilities.'
    )
