"""The fields that bodies share which ask for a reply: sampling, lengths, messages, tools.

A field is honoured, or refused but for the values that ask for nothing (`Only`), or ignored
(`Ignored`). What the description cannot say stands in rules.py. Ranges that depend on the model are
the engine's business.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from sfumato.options.limits import MOST_SECONDS, MOST_TOKENS
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, Objects, Texts, at_most
from sfumato.server.schemas.neutral import AtTheEnd, Ignored, Neutral


class Sampling(Neutral, Body):
    """How a reply is sampled and sent; null means the checkpoint's default."""

    temperature: float | None = Field(None, description="Scales the temperature schedule.")
    top_p: float | None = Field(None, description="Draw from the most probable share only.")
    top_k: int | None = Field(None, description="Draw from the k most probable; 0 and -1: all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed, same text.")
    stop: Annotated[str | Texts | None, WithJsonSchema(json_schemas.STOP)] = Field(
        None, description="Texts that end the reply; an empty one is none."
    )
    logit_bias: Annotated[
        dict[str, float] | None,
        at_most(json_schemas.MOST_BIASES),
        WithJsonSchema(json_schemas.BIAS),
    ] = Field(None, description="Token id → -100 … 100, added to its score; -100 bans it.")
    min_tokens: int | None = Field(None, description="No end token before so many tokens.")
    ignore_eos: bool | None = Field(None, description="End tokens are banned.")
    max_steps: int | None = Field(None, description="Denoising steps per canvas at most.")
    sampler: Annotated[str | None, WithJsonSchema(json_schemas.SAMPLER)] = Field(
        None, description="entropy-bound, fixed-count or threshold."
    )
    entropy_bound: float | None = Field(None, description="Nats; of the entropy-bound sampler.")
    count: int | None = Field(None, description="Positions a step; of the fixed-count sampler.")
    threshold: float | None = Field(None, description="Probability; of the threshold sampler.")
    margin: float | None = Field(None, description="Over the runner-up; of the threshold sampler.")
    t_min: float | None = Field(None, description="Temperature after the last step.")
    t_max: float | None = Field(None, description="Temperature at the first step.")
    stability: int | None = Field(None, description="Steps that a settled canvas stays the same.")
    confidence: float | None = Field(None, description="Mean nats under which it has settled.")
    canvas_length: int | None = Field(None, description="Tokens of a canvas.")
    self_conditioning: bool | None = Field(None, description="False: steps see no soft embedding.")
    soft_skip: float | None = Field(None, description="Share that soft embeddings may leave out.")
    soft_top_k: int | None = Field(None, description="Most probable tokens it is made of; all.")
    max_thinking_tokens: int | None = Field(None, ge=0, description="Then the thought is closed.")
    retry_empty: bool | None = Field(None, description="Draw an empty answer again (true).")
    timeout: float | None = Field(
        None, gt=0, le=MOST_SECONDS, description="Seconds until the request fails."
    )
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_drafts: bool | None = Field(None, description="Send draft and settled frames too.")


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
    n: int | None = Field(None, ge=1, description="Replies; the i-th has the seed plus i.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")
