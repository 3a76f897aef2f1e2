"""The body of OpenAI's responses.

Items of the input and tools are described by JSON schemas, for the API description alone: the code
that reads them checks more than their Python types say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema

from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, First, Ignored, Objects, Only, at_most
from sfumato.server.schemas.generation import JsonSchema, MaxTokens, Sampling
from sfumato.server.schemas.json_schemas import NAME, NULL, TEXT, Schema, either, within

_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 128}


def _object(required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    """Unknown keys pass where they are null."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": NULL,
    }


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


def _parts(*kinds: str) -> Schema:
    part = {"type": {"enum": list(kinds)}, "text": TEXT}
    return {"type": "array", "items": _object(part, {}) | {"additionalProperties": {}}}


_FURTHER: dict[str, Schema] = {
    "id": either(_ID, NULL),
    "status": {},
    "phase": {},
}
_MESSAGE: dict[str, Schema] = {"type": {"const": "message"}, **_FURTHER}
_CALL_TYPE, _OUTPUT_TYPE = {"const": "function_call"}, {"const": "function_call_output"}
INPUT = either(
    TEXT,
    _list(
        either(
            _object(
                {
                    "role": {"enum": ["user", "system", "developer"]},
                    "content": either(TEXT, _parts("input_text")),
                },
                _MESSAGE,
            ),
            _object(
                {"role": {"const": "assistant"}, "content": either(TEXT, _parts("output_text"))},
                _MESSAGE,
            ),
            _object(
                {
                    "type": _CALL_TYPE,
                    "call_id": _ID,
                    "name": {"type": "string", "pattern": NAME},
                    "arguments": {"enum": ["", "{}"]},
                },
                {**_FURTHER, "namespace": {}, "caller": {}, "async": {}, "created_by": {}},
            ),
            _object(
                {
                    "type": _OUTPUT_TYPE,
                    "call_id": _ID,
                    "output": either(TEXT, _parts("input_text")),
                },
                {**_FURTHER, "name": {}, "namespace": {}, "caller": {}, "created_by": {}},
            ),
            _object({"type": {"const": "reasoning"}}, {}) | {"additionalProperties": {}},
            _object({"type": {"const": "item_reference"}, "id": _ID}, {}),
        ),
        least=1,
    ),
)
_FUNCTION = _object(
    {"type": {"const": "function"}, "name": {"type": "string", "pattern": NAME}},
    {
        "description": either(TEXT, NULL),
        "parameters": either({"type": "object"}, NULL),
        "strict": either({"type": "boolean"}, NULL),
        "defer_loading": {},
        "allowed_callers": {},
        "async": {},
        "output_schema": {},
    },
)
TOOLS = either(_list(_FUNCTION), NULL)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    _object({"type": {"const": "function"}, "name": TEXT}, {}),
)

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

    input: Annotated[str | Objects, WithJsonSchema(INPUT)] = Field(
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
    tools: Annotated[Objects | None, WithJsonSchema(TOOLS)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(TOOL_CHOICE)] = Field(
        None, description='none, auto, required, or {"type": "function", "name": …}.'
    )
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
