"""The bodies of OpenAI's chat and text completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.options.limits import MOST_TOKENS
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First, Ids, Objects, Texts
from sfumato.server.schemas.generation import (
    AddPrompt,
    Continue,
    Generation,
    MaxTokens,
    Messages,
    TemplateKwargs,
    Tools,
)
from sfumato.server.schemas.neutral import Ignored, Only
from sfumato.server.schemas.settings import within

NoFunctions = Only([], "none", "auto", why="is long deprecated; use tools and tool_choice")


class Prediction(Body):
    """What the canvases of a reply begin as."""

    type: Annotated[Any, Only("content", why='must be "content"')] = None
    content: Annotated[str | Objects, WithJsonSchema(json_schemas.TEXTS)] = Field(
        description="A text, or text parts."
    )
    strength: float | None = Field(
        None, ge=0, le=1, description="Share of the positions that begins as noise."
    )


class ChatBody(Generation):
    messages: Messages = Field(min_length=1)
    add_generation_prompt: AddPrompt = None
    continue_final_message: Continue = None
    max_completion_tokens: MaxTokens = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    tools: Tools = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, WithJsonSchema(json_schemas.TOOL_CHOICE)
    ] = Field(
        None,
        description='none, auto, required, or {"type": "function", "function": {"name": …}}.',
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning_effort: Annotated[str | None, WithJsonSchema(json_schemas.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    audio: Annotated[Any, Only(why="audio is not supported")] = None
    modalities: Annotated[Any, Only(["text"], why="only text is supported")] = None
    functions: Annotated[Any, NoFunctions] = None
    function_call: Annotated[Any, NoFunctions] = None
    store: Annotated[Any, Only(False, why="nothing is stored here")] = None
    web_search_options: Annotated[Any, Only(why="there is no web search here")] = None
    moderation: Annotated[Any, Only(why="there is no moderation here")] = None
    verbosity: Annotated[
        Any, Only("medium", why="cannot be set; say in a message how long the answer should be")
    ] = None
    metadata: Ignored = None
    prediction: Prediction | None = Field(
        None, description="A text that the reply is expected to resemble."
    )
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None


class CompletionBody(Generation):
    prompt: Annotated[
        str | Texts | Ids | Annotated[list[Ids], First], WithJsonSchema(json_schemas.PROMPTS)
    ]
    logprobs: Annotated[int | None, within("top_tokens")] = Field(None, description="Alternatives.")
    max_tokens: Annotated[
        int | None,
        Field(ge=-1, le=MOST_TOKENS),
        WithJsonSchema(json_schemas.MAX_TOKENS_OR_NONE),
    ] = Field(None, description="-1: what fits; 0: none, with echo or prompt_logprobs.")
    echo: bool | None = Field(
        None,
        description="Begin the text with the prompt, and with logprobs score its tokens; the reply "
        "is written in the mode causal.",
    )
    prompt_logprobs: Annotated[int | None, within("top_tokens")] = Field(
        None, description="Score the prompt's tokens, and name so many alternatives; not streamed."
    )
    suffix: str | None = Field(
        None, description="What comes after the text, which is as long as fits between the two."
    )
