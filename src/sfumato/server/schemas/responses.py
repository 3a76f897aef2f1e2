"""The body of OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema

from sfumato.server.schemas import json_schemas, response_items
from sfumato.server.schemas.body import Body, First, Objects, at_most
from sfumato.server.schemas.generation import MaxTokens, Sampling
from sfumato.server.schemas.grammars import JsonSchema
from sfumato.server.schemas.neutral import Ignored, Only
from sfumato.server.schemas.settings import within

MOST_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512  # as OpenAI has them
LONGEST_ID = 128

_Summary = Literal["auto", "concise", "detailed"] | None
_Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=LONGEST_NAME)],
        Annotated[str, Field(max_length=LONGEST_VALUE)],
    ],
    Field(max_length=MOST_METADATA),
]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
MOST_INCLUDED = 16


class Reasoning(Body):
    """Whether the model thinks before it answers."""

    effort: Annotated[str | None, WithJsonSchema(json_schemas.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    summary: _Summary = Field(None, description="The summary is the whole thought in any case.")
    generate_summary: _Summary = Field(None, description="The same as summary.")
    context: Ignored = None
    mode: Ignored = None


class TextFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(
        None, max_length=LONGEST_NAME, description="Accepted and ignored; is in the response."
    )
    description: Ignored = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="None: any object.")
    strict: bool | None = Field(None, description="The schema is held whether or not it is true.")


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[
        Any, Only("medium", why="cannot be set; say in a message how long the answer should be")
    ] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Ignored = None


class ResponsesBody(Sampling):
    """A request for one response."""

    _echo: Any = PrivateAttr(None)

    input: Annotated[str | Objects, WithJsonSchema(response_items.INPUT)] = Field(
        description="A text, or items: messages, function calls and their outputs, references."
    )
    instructions: str | None = Field(None, description="A message of the system, which is first.")
    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    max_output_tokens: MaxTokens = Field(None, description="Visible tokens at most.")
    previous_response_id: Annotated[str | None, Field(max_length=LONGEST_ID)] = Field(
        None, description="The response that this one follows, in a conversation."
    )
    store: bool | None = Field(None, description="Keep the response (true).")
    text: TextOptions | None = None
    tools: Annotated[Objects | None, WithJsonSchema(response_items.TOOLS)] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, WithJsonSchema(response_items.TOOL_CHOICE)
    ] = Field(None, description='none, auto, required, or {"type": "function", "name": …}.')
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning: Reasoning | None = None
    include: Annotated[list[_Include] | None, First, Field(max_length=MOST_INCLUDED)] = None
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest turns are left out where the input is too long."
    )
    metadata: Annotated[_Metadata | None, at_most(MOST_METADATA)] = Field(
        None, description="Is in the response as it is."
    )
    stream_options: ResponseStreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")
    background: Annotated[
        Any, Only(False, why="is not supported; a response is made while its client waits")
    ] = None
    conversation: Annotated[Any, Only(why="is not supported; use previous_response_id")] = None
    prompt: Annotated[Any, Only(why="is not supported; there are no stored prompts here")] = None
    moderation: Annotated[Any, Only(why="there is no moderation here")] = None
    context_management: Annotated[Any, Only([], why='is not supported; use truncation: "auto"')] = (
        None
    )
    max_tool_calls: Ignored = None
    image: Ignored = None
    access_programs: Ignored = None
    background_options: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None

    @property
    def echo(self) -> Any:
        """What the dialect keeps of the fields that are dropped before the reply."""
        return self._echo

    def keep(self, echo: object) -> None:
        """Sets `echo`."""
        self._echo = echo
