"""The bodies of Anthropic's API: messages, and the count of a prompt's tokens.

Content blocks are read one by one where a conversation is made of them; the bodies hold them as
they came.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.server.schemas import anthropic_schemas as schema
from sfumato.server.schemas.body import Body, Objects, Texts
from sfumato.server.schemas.generation import Sampling
from sfumato.server.schemas.grammars import JsonSchema
from sfumato.server.schemas.neutral import Ignored, Only

_HOSTED = "nothing runs here beside the model; run tools in the client"


class ThinkingConfig(Body):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = Field(
        description="disabled, between_tools: no thinking."
    )
    budget_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Of a thought at most; less than max_tokens."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks of thinking have a signature and no text."
    )


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of a tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: one call at most.")


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")
    name: Ignored = None
    strict: Ignored = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Of adaptive thinking: tokens of a thought, as reasoning_effort."
    )
    format: OutputFormat | None = None
    task_budget: Ignored = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=512, description="Written to the audit log.")


class AnthropicPrompt(BaseModel):
    """What a prompt is made of, and fields of Anthropic's API without an effect here."""

    # Before the messages, which are of one turn alone where a thread is continued.
    thread: Annotated[Any, Only(why="no conversation is stored here; send all of its messages")] = (
        None
    )
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    messages: Annotated[Objects, WithJsonSchema(schema.MESSAGES)] = Field(min_length=1)
    system: Annotated[str | Objects | None, WithJsonSchema(schema.SYSTEM)] = None
    tools: Annotated[Objects | None, WithJsonSchema(schema.TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="None: no thinking.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="The same as output_config.format."
    )
    mcp_servers: Annotated[Any, Only([], why=_HOSTED)] = None
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


class MessagesBody(AnthropicPrompt, Sampling):
    max_tokens: int = Field(
        ge=0, le=MOST_TOKENS, description="Thoughts included; 0: the prompt is only encoded."
    )
    stop_sequences: Texts | None = Field(None, description="The same as stop.")
    metadata: Metadata | None = None
    container: Annotated[Any, Only(why=_HOSTED)] = None
    fallbacks: Annotated[Any, Only([], why="one model is loaded")] = None
    betas: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None


class CountBody(AnthropicPrompt, Body):
    """A prompt whose tokens are counted."""

    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Accepted and ignored.")
    betas: Ignored = None
