"""vLLM's fields for a canvas that the client gives, and for log probabilities of chosen tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sfumato.diffusion.sampler_config import MOST_NAMED
from sfumato.options.limits import MOST_TOKENS
from sfumato.server.schemas.body import Body, First
from sfumato.server.schemas.neutral import Only

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
