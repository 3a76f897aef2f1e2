"""The bodies of llama-server's own routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from sfumato.options.limits import MOST_SECONDS, MOST_TOKENS, MOST_TOP
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First, Ids
from sfumato.server.schemas.generation import (
    Continue,
    Messages,
    Sampling,
    TemplateKwargs,
    Tools,
)
from sfumato.server.schemas.neutral import Ignored, Only

_TOP_P = "is not supported; use top_p"
_PENALTY = "penalties are not supported"
RANDOM_SEEDS = (-1, 2**32 - 1)
"""Seeds that llama-server reads as: draw one."""

Predict = Annotated[
    int | None,
    Field(ge=-1, le=MOST_TOKENS, description="Tokens at most; -1: what fits; 0: none."),
]
_Prompts = str | dict[str, Any] | Annotated[list[Any], First]
_Paths = Annotated[
    list[Annotated[str, Field(max_length=100)]], First, Field(max_length=64), AfterValidator(tuple)
]


class LlamaSampling(Sampling):
    """What llama-server has on each of its routes that generate."""

    logit_bias: Annotated[Any, WithJsonSchema(json_schemas.LLAMA_BIAS)] = Field(
        None, description="An object or a list of pairs, of ids or texts; false bans a token."
    )
    n_keep: Ignored = None
    n_discard: Ignored = None
    n_indent: Ignored = None
    samplers: Ignored = None
    t_max_prompt_ms: Ignored = None
    t_max_predict_ms: int | None = Field(
        None,
        ge=-1,
        le=MOST_SECONDS,
        description="Milliseconds after which a reply that has a line break ends with what has "
        "settled; they count from the first text. 0 and -1: no limit.",
    )
    min_keep: Ignored = None
    typical_p: Annotated[Any, Only(1, why=_TOP_P)] = None
    top_n_sigma: Annotated[Any, Only(-1, 0, why=_TOP_P)] = None
    dynatemp_range: Annotated[Any, Only(0, why="is not supported; use t_min and t_max")] = None
    dynatemp_exponent: Ignored = None
    xtc_probability: Annotated[Any, Only(0, why=_TOP_P)] = None
    xtc_threshold: Ignored = None
    repeat_penalty: Annotated[Any, Only(1, why=_PENALTY)] = None
    repeat_last_n: Ignored = None
    dry_multiplier: Annotated[Any, Only(0, why=_PENALTY)] = None
    dry_base: Ignored = None
    dry_allowed_length: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    mirostat: Annotated[Any, Only(0, why="is not supported")] = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    adaptive_target: Annotated[Any, Only(-1, why="is not supported")] = None
    adaptive_decay: Ignored = None
    backend_sampling: Ignored = None
    lora: Annotated[Any, Only([], why="there are no adapters here")] = None
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    response_fields: _Paths | None = Field(
        None,
        description='Only these fields of the answer: "content", "timings/predicted_n"; an empty '
        "list: all.",
    )


class LlamaBody(LlamaSampling):
    """llama-server's own completion. What it has and we have not is refused unless neutral."""

    prompt: Annotated[_Prompts, WithJsonSchema(json_schemas.MIXED_PROMPTS)] = Field(
        description="Text, ids and texts in one list, or a list of prompts."
    )
    n_predict: Predict = None
    max_tokens: Predict = Field(None, description="The same as n_predict.")
    n_probs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="Most probable tokens that each token is shown with."
    )
    post_sampling_probs: bool | None = Field(
        None, description="Show probabilities in place of their logarithms."
    )
    return_tokens: bool | None = Field(None, description="Answer the reply's token ids, too.")


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
