"""The body of OpenAI's responses, the request that it becomes, and what the response repeats of it.

Items of the input and tools are described by JSON schemas, for the API description alone: the code
that reads them checks more than their Python types say. The body loses its lists and longer texts
before the reply is written. The echo lives as long as the reply is written, so its bytes are
bounded here: nothing else counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    requests_of,
    thinking_of,
    tool_use,
)
from sfumato.server.dialects.responses.input import (
    LONGEST_ID,
    Message,
    References,
    conversation,
    heads,
    items_of,
    latest_turns,
    names_of,
    nested,
    nested_choice,
    shown_choice,
    shown_tools,
)
from sfumato.server.response_store import Item, Missing
from sfumato.server.schemas import (
    NAME,
    NULL,
    TEXT,
    Body,
    First,
    JsonSchema,
    MaxTokens,
    Objects,
    Only,
    Sampling,
    Schema,
    at_most,
    closed,
    either,
    list_of,
    open_object,
    within,
    without_effect,
)
from sfumato.server.service import Service
from sfumato.text.prompt import prompt_ids

_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 128}


def _parts(*kinds: str) -> Schema:
    part = {"type": {"enum": list(kinds)}, "text": TEXT}
    return list_of(open_object(part))


_FURTHER: dict[str, Schema] = {
    "id": either(_ID, NULL),
    "status": {},
    "phase": {},
}
_MESSAGE: dict[str, Schema] = {"type": {"const": "message"}, **_FURTHER}
_CALL_TYPE, _OUTPUT_TYPE = {"const": "function_call"}, {"const": "function_call_output"}
INPUT = either(
    TEXT,
    list_of(
        either(
            closed(
                {
                    "role": {"enum": ["user", "system", "developer"]},
                    "content": either(TEXT, _parts("input_text")),
                },
                _MESSAGE,
            ),
            closed(
                {"role": {"const": "assistant"}, "content": either(TEXT, _parts("output_text"))},
                _MESSAGE,
            ),
            closed(
                {
                    "type": _CALL_TYPE,
                    "call_id": _ID,
                    "name": {"type": "string", "pattern": NAME},
                    "arguments": {"enum": ["", "{}"]},
                },
                {**_FURTHER, "namespace": {}, "caller": {}, "async": {}, "created_by": {}},
            ),
            closed(
                {
                    "type": _OUTPUT_TYPE,
                    "call_id": _ID,
                    "output": either(TEXT, _parts("input_text")),
                },
                {**_FURTHER, "name": {}, "namespace": {}, "caller": {}, "created_by": {}},
            ),
            open_object({"type": {"const": "reasoning"}}),
            closed({"type": {"const": "item_reference"}, "id": _ID}, {}),
        ),
        least=1,
    ),
)
_FUNCTION = closed(
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
TOOLS = either(list_of(_FUNCTION), NULL)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    closed({"type": {"const": "function"}, "name": TEXT}, {}),
)

MOST_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512  # as OpenAI has them

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


@without_effect("context mode")
class Reasoning(Body):
    """Whether the model thinks before it answers."""

    effort: Annotated[str | None, WithJsonSchema(schemas.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    summary: _Summary = Field(None, description="The summary is the whole thought in any case.")
    generate_summary: _Summary = Field(None, description="The same as summary.")


@without_effect("description")
class TextFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(
        None, max_length=LONGEST_NAME, description="Accepted and ignored; is in the response."
    )
    schema_: JsonSchema | None = Field(None, alias="schema", description="None: any object.")
    strict: bool | None = Field(None, description="The schema is held whether or not it is true.")


@without_effect(
    verbosity=Only("medium", why="cannot be set; say in a message how long the answer should be"),
)
class TextOptions(Body):
    format: TextFormat | None = None


@without_effect("include_obfuscation")
class ResponseStreamOptions(Body):
    """How a stream is sent."""


@without_effect(
    "max_tool_calls image access_programs background_options prompt_cache_key "
    "prompt_cache_options prompt_cache_retention safety_identifier service_tier",
    background=Only(False, why="is not supported; a response is made while its client waits"),
    conversation=Only(why="is not supported; use previous_response_id"),
    prompt=Only(why="is not supported; there are no stored prompts here"),
    moderation=Only(why="there is no moderation here"),
    context_management=Only([], why='is not supported; use truncation: "auto"'),
)
class ResponsesBody(Sampling):
    """A request for one response."""

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


MOST_ECHOED = 2**18  # characters of the tools, and again of the schema
MOST_WAITING = 2**20  # of an input that was cut, and waits for the end of its reply to be kept


@dataclass(frozen=True)
class RequestEcho:
    owner: str
    items: tuple[Item, ...]  # of the body's own input, where the response is kept
    fields: dict[str, Any]  # of the response
    logprobs: bool
    encrypted: bool  # whether thoughts have an encrypted content
    notes: tuple[str, ...]  # for `warnings`


def is_short(values: Iterable[Any], most: int = MOST_ECHOED) -> bool:
    """Whether values of JSON come to at most so many characters."""
    count = 0
    for value in values:
        count += len(json.dumps(value, ensure_ascii=False))
        if count > most:
            return False
    return True


def bounded(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The fields, in which long tools are none and a long schema is an empty one; notes: gets a
    line for each."""
    if not is_short(fields["tools"]):
        fields = fields | {"tools": []}
        notes.append("tools: too long to be repeated in the response")
    text = fields["text"]
    if not is_short([text["format"].get("schema")]):
        fields = fields | {"text": text | {"format": text["format"] | {"schema": {}}}}
        notes.append("text.format.schema: too long to be repeated in the response")
    return fields


PATH = "/v1/responses"
WORDING = {
    "messages": "input",
    "tools[].function": "tools[]",
    "max_tokens": "max_output_tokens",
}
"""What the engine's and chat's checks name, and this body calls otherwise."""

_OBJECT = {"type": "object"}


def parse(service: Service, body: ResponsesBody) -> list[Request]:
    """The one request. Raises Refused."""
    before, placed = _items(service, body)
    own = [item for _, item in placed]
    earlier = [("previous_response_id", item) for item in before]
    turns = conversation(body.instructions, [*earlier, *placed])
    call = _call(service, body, [turn.message for turn in turns])
    notes: list[str] = []
    over = len(turns) - _fitting(service, call) if body.truncation == "auto" else 0
    if over:
        notes.append(f"input: the oldest {over} messages are left out")
        head = heads(call.messages or [])
        turns = [*turns[:head], *turns[head + over :]]
    messages = [turn.message for turn in turns]
    requests = requests_of(service, replace(call, messages=messages, names=names_of(turns)))
    body.envelope.echo = _echo(service, body, own, over > 0, notes)
    return requests


def _items(service: Service, body: ResponsesBody) -> tuple[list[Item], list[tuple[str, Item]]]:
    """The items of the responses before, and the body's own with their places. Raises Refused."""
    most, store = service.settings.max_messages, service.responses
    if not isinstance(body.input, str) and len(body.input) > most:
        raise _too_many(len(body.input), most)
    referred = References(store, body.envelope.owner, service.settings.max_body)
    own = items_of(body.input, referred.item, body.envelope.unknown)
    before: list[Item] = []
    try:
        for entry in store.chain(body.envelope.owner, body.previous_response_id, most):
            if entry.status == "in_progress":
                raise Refused(
                    "previous_response_id",
                    "that response is still being made",
                    "wait for its end, or cancel it",
                )
            referred.count(len(entry.items) + len(entry.output))
            before += [*entry.inputs, *entry.outputs]
            if len(before) + len(own) > most:
                raise _too_many(len(before) + len(own), most)
    except Missing as missing:
        raise Refused(
            "previous_response_id",
            f"there is no response {str(missing.args[0])[:128]!r} here",
            "it was not kept (store), or was forgotten (--response-store); send the whole "
            "conversation as input",
            code="previous_response_not_found",
        ) from None
    return [item for item in before if item["type"] != "reasoning"], own


def _too_many(count: int, most: int) -> Refused:
    return Refused(
        "input",
        f"{count} items with those of the responses before, and this server takes {most}",
        "leave out old ones, or raise --max-messages",
    )


def _call(service: Service, body: ResponsesBody, messages: list[Message]) -> ChatCall:
    """Raises Refused."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatCall(
        PATH,
        body,
        messages,
        continues=False,
        tools=nested(body.tools, body.envelope.unknown),
        tool_choice=nested_choice(body.tool_choice),
        is_single=body.parallel_tool_calls is False,
        forms=_of_text(body),
        thinking=Thinking(effort, most=body.max_thinking_tokens, effort_field="reasoning.effort"),
        alternatives=body.top_logprobs,
        limit=body.max_output_tokens,
        user=body.user,
        sized=("max_tokens", "top_logprobs"),
    )


def _of_text(body: ResponsesBody) -> Iterator[GrammarSource]:
    """What `text.format` asks for. Raises ValueError."""
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return
    schema = given.schema_ if given.type == "json_schema" else None
    yield schema_source(_OBJECT if schema is None else schema, "text.format.schema")


def _fitting(service: Service, call: ChatCall) -> int:
    """How many of the messages fit a slot together with the reply. Raises Refused."""
    model, messages = service.model, call.messages or []
    thinking, _ = thinking_of(call.thinking)
    tools = tool_use(call.tools, call.tool_choice, model).tools
    canvas = call.drawn.canvas_length or model.config.canvas_length
    room = canvas if call.limit is None or call.limit == -1 else call.limit

    def fits(messages: Sequence[Any]) -> bool:
        try:
            ids = prompt_ids(
                model.template,
                model.tokenizer,
                messages,
                thinking=thinking,
                tools=tools,
                check=lambda text: service.engine.check_length(text, "input"),
            )
        except ValueError:  # too long, or wrong, which is said where the prompt is made
            return False
        return len(ids) + room <= service.context

    return len(latest_turns(messages, fits))


def _echo(
    service: Service, body: ResponsesBody, own: list[Item], is_cut: bool, notes: list[str]
) -> RequestEcho:
    """is_cut: whether the prompt lacks a part of the input, which nothing else holds then."""
    is_kept = body.store is not False and service.responses.keeps
    if is_kept and is_cut and not body.stream and not is_short(own, MOST_WAITING):
        is_kept = False
        notes.append("store: the response is not kept: its input is too long, and was cut")
    include = body.include or []
    text = body.text
    shown: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        given = text.format
        of_format = {"name": given.name, "schema": given.schema_, "strict": given.strict}
        shown = {"type": given.type}
        shown |= {name: value for name, value in of_format.items() if value is not None}
    reasoning = body.reasoning
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": is_kept,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": shown_choice(body.tool_choice),
        "tools": shown_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    fields = bounded(fields, notes)
    return RequestEcho(
        body.envelope.owner,
        tuple(own) if is_kept else (),
        fields,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        encrypted=ENCRYPTED in include,
        notes=tuple(notes),
    )
