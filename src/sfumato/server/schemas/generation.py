"""The fields that bodies share which ask for a reply: sampling, lengths, messages, tools.

A field is honoured, or refused but for the values that ask for nothing (`Only`), or ignored
(`Ignored`). What the description cannot say stands in openapi.py. Ranges that depend on the
model are the engine's business.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, Objects, Texts, at_most
from sfumato.server.schemas.grammars import Grammars
from sfumato.server.schemas.neutral import AtTheEnd, Ignored, Neutral
from sfumato.server.schemas.settings import within
from sfumato.server.schemas.vllm import NamedTokens, VllmXargs


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
