"""The body of OpenAI's responses, and the request that it becomes.

Items of the input and tools are described by JSON schemas; the code that reads them checks more
than their Python types say. The input's items are checked, and kept in the shape that they get
here; what refers to kept ones is looked up once, and bounded as a body is. Messages, function calls
and their outputs become messages of a chat; thoughts go, since no past thought returns to the
model.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat.call import ChatCall, Message, Thinking, requests_of, thinking_of, tool_use
from sfumato.server.chat.pictures import check as check_pictures
from sfumato.server.chat.pictures import message_part, messages_read, of_url, sources_in
from sfumato.server.dialects.openai_chat import IMAGES, UNSUPPORTED
from sfumato.server.response_store import Item, Missing, ResponseStore, Stored
from sfumato.server.schemas import (
    NAME,
    NULL,
    TEXT,
    Body,
    First,
    JsonSchema,
    MaxTokens,
    ModelName,
    Objects,
    Only,
    Sampling,
    Schema,
    Unknown,
    at_most,
    closed,
    either,
    list_of,
    open_object,
    within,
    without_effect,
)
from sfumato.server.service import Service
from sfumato.text.messages import PictureParts, tool_name
from sfumato.text.prompt import prompt_ids

LONGEST_ID = 128
_ID: Schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_ID}


def _parts(*kinds: str) -> Schema:
    part = {"type": {"enum": list(kinds)}, "text": TEXT}
    return list_of(open_object(part))


_FURTHER: dict[str, Schema] = {
    "id": either(_ID, NULL),
    "status": {},
    "phase": {},
}
_MESSAGE: dict[str, Schema] = {"type": {"const": "message"}, **_FURTHER}
# The code that reads items looks here for the fields that are known.
_ITEMS = {
    "message": closed(
        {
            "role": {"enum": ["user", "system", "developer"]},
            "content": either(TEXT, _parts("input_text")),
        },
        _MESSAGE,
    ),
    "function_call": closed(
        {
            "type": {"const": "function_call"},
            "call_id": _ID,
            "name": {"type": "string", "pattern": NAME},
            "arguments": {"enum": ["", "{}"]},
        },
        {**_FURTHER, "namespace": {}, "caller": {}, "async": {}, "created_by": {}},
    ),
    "function_call_output": closed(
        {
            "type": {"const": "function_call_output"},
            "call_id": _ID,
            "output": either(TEXT, _parts("input_text")),
        },
        {**_FURTHER, "name": {}, "namespace": {}, "caller": {}, "created_by": {}},
    ),
    "item_reference": closed({"type": {"const": "item_reference"}, "id": _ID}, {}),
}
INPUT = either(
    TEXT,
    list_of(
        either(
            _ITEMS["message"],
            closed(
                {"role": {"const": "assistant"}, "content": either(TEXT, _parts("output_text"))},
                _MESSAGE,
            ),
            _ITEMS["function_call"],
            _ITEMS["function_call_output"],
            open_object({"type": {"const": "reasoning"}}),
            _ITEMS["item_reference"],
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
Metadata = Annotated[
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
    model: ModelName = None
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
    metadata: Annotated[Metadata | None, at_most(MOST_METADATA)] = Field(
        None, description="Is in the response as it is."
    )
    stream_options: ResponseStreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")


class References:
    """The kept items of one owner, for one body: a reference takes few bytes, and what it refers to
    may be large, and may be referred to many times."""

    def __init__(self, store: ResponseStore, owner: str, most: int) -> None:
        """most: characters that the body may refer to, all together."""
        self._store, self._owner = store, owner
        self._most, self._count = most, 0
        self._items: dict[str, Item] = {}
        self._read: list[Stored] = []

    def item(self, name: str) -> Item:
        """Raises Missing, and Refused for too much."""
        if name not in self._items:
            home = self._store.home(self._owner, name)
            if home not in self._read:
                self._read.append(home)
                for each in (*home.inputs, *home.outputs):
                    self._items.setdefault(each["id"], each)
            if name not in self._items:
                raise Missing(name)
        self.count(_size(self._items[name]))
        return self._items[name]

    def count(self, characters: int) -> None:
        """So many more are referred to. Raises Refused for too many."""
        self._count += characters
        if self._count > self._most:
            raise Refused(
                "input",
                f"comes to over {self._most:,} characters with the items that it refers to",
                "leave out old ones, or raise --max-body",
                code="input_too_large",
            )


def _size(item: Item) -> int:
    """Characters of the item's texts, and of the URLs of its pictures."""
    output = item.get("output", "")
    parts = [*item.get("content", ()), *(output if isinstance(output, list) else ())]
    texts = [part.get(name) or "" for part in parts for name in ("text", "image_url")]
    own = output if isinstance(output, str) else ""
    return len(item.get("arguments", "")) + len(own) + sum(map(len, texts))


Find = Callable[[str], Item]
"""An item by its id; raises Missing."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_REASONING = "rs_"  # what ids of reasoning items begin with


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def items_of(
    given: str | Sequence[Mapping[str, Any]], find: Find, unknown: Unknown
) -> list[tuple[str, Item]]:
    """Each with its place. find: looks up references. Raises Refused."""
    if isinstance(given, str):
        return [("input", _message("user", [_input(given)], new_id("msg")))]
    if not given:
        raise Refused("input", "is empty", "send a text or at least one item")
    places = ((f"input[{i}]", item) for i, item in enumerate(given))
    checked = ((where, _item(item, where, find, unknown)) for where, item in places)
    return [(where, item) for where, item in checked if item is not None]


def _item(item: Mapping[str, Any], where: str, find: Find, unknown: Unknown) -> Item | None:
    """None for a thought."""
    kind = item.get("type")
    if "type" not in item:
        kind = "message" if item.get("role") is not None else "item_reference"
    if kind == "reasoning":
        return None
    if not isinstance(kind, str) or kind not in _ITEMS:
        kinds = ", ".join((*_ITEMS, "reasoning"))
        raise Refused(f"{where}.type", f"must be one of {kinds}", code="unsupported")
    unknown.check(item, _ITEMS[kind]["properties"], where)
    if kind == "item_reference":
        return _referred(item, where, find)
    own = item.get("id") if item.get("id") is not None else new_id(_PREFIXES[kind])
    if not isinstance(own, str) or not 0 < len(own) <= LONGEST_ID:
        raise Refused(f"{where}.id", f"must be a text of 1 to {LONGEST_ID} characters")
    if kind == "message":
        return _checked_message(item, own, where)
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= LONGEST_ID:
        raise Refused(f"{where}.call_id", f"must be a text of 1 to {LONGEST_ID} characters")
    head = {"id": own, "type": kind, "status": "completed", "call_id": call_id}
    if kind == "function_call_output":
        parts = _contents(item.get("output"), f"{where}.output", _input)
        texts = [part["text"] for part in parts if "text" in part]
        return head | {"output": "".join(texts) if len(texts) == len(parts) else parts}
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise Refused(f"{where}.arguments", "must be a text of JSON")
    name = tool_name(item.get("name"), f"{where}.name")
    return head | {"name": name, "arguments": arguments}


def _referred(item: Mapping[str, Any], where: str, find: Find) -> Item | None:
    name = item.get("id")
    if not isinstance(name, str):
        raise Refused(f"{where}.id", "must be the id of an item")
    try:
        referred = find(name)
    except Missing:
        if name.startswith(_REASONING):
            return None
        raise Refused(
            f"{where}.id",
            f"there is no item {name[:LONGEST_ID]!r} here; send the item itself, or keep the "
            "response that it is of (store, --response-store)",
            code="item_not_found",
        ) from None
    return None if referred["type"] == "reasoning" else referred


def _checked_message(item: Mapping[str, Any], own: str, where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise Refused(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    made = _output if role == "assistant" else _input
    parts = _contents(item.get("content"), f"{where}.content", made)
    if role != "user" and any("image_url" in part for part in parts):
        raise Refused(f"{where}.content", "only messages of users have pictures")
    return _message(role, parts, own)


def _message(role: str, content: list[Item], own: str) -> Item:
    return {"id": own, "type": "message", "status": "completed", "role": role, "content": content}


def _input(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": []}


def _contents(content: Any, where: str, made: Callable[[str], Item]) -> list[Item]:
    """The parts of a content, which may be one text. made: makes a part of a text. Raises
    Refused."""
    if isinstance(content, str):
        return [made(content)]
    if not isinstance(content, list):
        raise Refused(where, "must be text or a list of parts")
    places = ((part, f"{where}[{i}]") for i, part in enumerate(content))
    return [_image(part, at) or made(_text(part, at)) for part, at in places]


def _image(part: Any, where: str) -> Item | None:
    """A picture as it is kept; None for another part. Raises Refused."""
    if not isinstance(part, Mapping) or part.get("type") not in IMAGES:
        return None
    of_url(part, where)  # whose checks are those of chat's
    url, detail = part["image_url"], part.get("detail")
    if isinstance(url, Mapping):
        url, detail = url["url"], url.get("detail")
    return {"type": "input_image", "image_url": url, "detail": detail or "auto"}


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise Refused(where, UNSUPPORTED[kind], code="unsupported")
    if kind != "refusal" and kind not in _TEXTS:
        raise Refused(f"{where}.type", "must be input_text, output_text or refusal")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise Refused(f"{where}.text", "must be text")
    return text


Tool = dict[str, Any]

_KEPT = ("name", "description", "parameters", "strict")
_DEFAULTS: Tool = {"description": None, "parameters": None, "strict": False}
_HOSTED = "hosted tools are not supported; only functions, which the client runs itself"


def nested(tools: Sequence[Mapping[str, Any]] | None, unknown: Unknown) -> list[Tool] | None:
    """Chat's tools. Raises Refused; what is wrong inside a function is found where chat's are
    checked."""
    if tools is None:
        return None
    return [_nested(tool, f"tools[{i}]", unknown) for i, tool in enumerate(tools)]


def _nested(tool: Mapping[str, Any], where: str, unknown: Unknown) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        name = f"{where}.type"
        raise Refused(name, f"must be function: {_HOSTED}", code="unsupported")
    unknown.check(tool, _FUNCTION["properties"], where)
    return {"type": "function", "function": _known(tool)}


def _known(tool: Mapping[str, Any]) -> Tool:
    return {name: tool[name] for name in _KEPT if tool.get(name) is not None}


def nested_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Chat's tool_choice. Raises Refused."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind != "function":
        raise Refused(
            "tool_choice.type", "must be function", "others are not supported", code="unsupported"
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """The tools as the response repeats them: without the fields that are ignored."""
    return [{"type": "function", **_DEFAULTS, **_known(tool)} for tool in tools or ()]


_INSTRUCTIONS = "instructions"


@dataclass
class Turn:
    """A message of the chat template, and where the message and its calls stand in the body."""

    message: Message
    place: str
    calls: list[str] = field(default_factory=list)
    outputs: list[Turn] = field(default_factory=list)  # of its calls


def conversation(instructions: str | None, items: Iterable[tuple[str, Item]]) -> list[Turn]:
    """items: each with its place. The output of a call stands right behind the message with that
    call, as the chat template has it, even where a user has written in between. Raises Refused."""
    turns: list[Turn] = []
    callers: dict[str, Turn] = {}  # by the ids of calls
    if instructions is not None:
        turns.append(Turn({"role": "system", "content": instructions}, _INSTRUCTIONS))
    for where, item in items:
        last = turns[-1] if turns else None
        is_open = last is not None and last.message["role"] == "assistant" and not last.outputs
        if item["type"] == "message":
            _add_message(turns, item, where, last if is_open else None)
        elif item["type"] == "function_call":
            if last is None or not is_open:
                last = Turn({"role": "assistant", "content": None}, where)
                turns.append(last)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            last.message.setdefault("tool_calls", []).append(call)
            last.calls.append(where)
            callers[item["call_id"]] = last
        elif item["type"] == "function_call_output":
            name = item["call_id"]
            if name not in callers:
                raise Refused(f"{where}.call_id", f"{name!r} is of no function_call before it")
            content = item["output"]
            if isinstance(content, list):
                content = _of_chat(content, f"{where}.output")
            output = {"role": "tool", "tool_call_id": name, "content": content}
            callers[name].outputs.append(Turn(output, where))
    if not turns:
        raise Refused("input", "holds nothing but thoughts", "add a message")
    return [each for turn in turns for each in (turn, *turn.outputs)]


def _add_message(turns: list[Turn], item: Item, where: str, last: Turn | None) -> None:
    """last: the assistant's turn that is still open."""
    role = "system" if item["role"] == "developer" else item["role"]
    parts = _of_chat(item["content"], f"{where}.content")
    texts = [part["text"] for part in parts if "text" in part]
    if role == "assistant" and last is not None and last.message.get("tool_calls"):
        # Outputs follow the message with their calls, so text behind calls joins that message.
        last.message["content"] = (last.message.get("content") or "") + "".join(texts)
        return
    content: Any = "".join(texts)
    if len(parts) > len(texts) or (len(texts) > 1 and role == "user"):
        content = parts
    turns.append(Turn({"role": role, "content": content}, where))


def _of_chat(parts: Sequence[Item], where: str) -> list[dict[str, Any]]:
    """Parts of a message of the chat template."""
    return [
        {"type": "text", "text": part["text"]}
        if "text" in part
        else message_part(of_url(part, f"{where}[{i}]"))
        for i, part in enumerate(parts)
    ]


def names_of(turns: Iterable[Turn]) -> dict[str, str]:
    """What the body calls the messages, by the names that they have for the engine."""
    names = {}
    for number, turn in enumerate(turns):
        at, place = f"messages[{number}]", turn.place
        names[at] = place
        if turn.message["role"] == "tool":
            names |= {f"{at}.tool_call_id": f"{place}.call_id", f"{at}.content": f"{place}.output"}
        elif place == _INSTRUCTIONS:
            names[f"{at}.content"] = place
        for place_in_turn, call in enumerate(turn.calls):
            calls = f"{at}.tool_calls[{place_in_turn}]"
            names |= {calls: call, f"{calls}.function": call}
    return names


def latest_turns(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> list[Message]:
    """The messages without the oldest turns, as few of them as makes the others fit: the system's
    first messages, and those from a user's message on. Where no turn fits, the last one."""
    head = heads(messages)
    starts = [i for i, each in enumerate(messages) if each["role"] == "user" and i > head]
    shorter: list[list[Message]] = [[*messages[:head], *messages[at:]] for at in starts]
    if not shorter or fits(messages):
        return list(messages)
    at = bisect_left(range(len(shorter)), True, key=lambda i: fits(shorter[i]))
    return shorter[min(at, len(shorter) - 1)]


def heads(messages: Sequence[Message]) -> int:
    """How many messages of the system come first."""
    return next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))


PATH = "/v1/responses"
WORDING = {
    "messages": "input",
    "tools[].function": "tools[]",
    "max_tokens": "max_output_tokens",
}
"""What the engine's and chat's checks name, and this body calls otherwise."""

_OBJECT = {"type": "object"}


def request_and_input(
    service: Service, body: ResponsesBody
) -> tuple[list[Request], list[Item], list[str]]:
    """The one request, the items of the body's own input, and a note where the prompt lacks a part
    of it. Raises Refused."""
    before, placed = _items(service, body)
    own = [item for _, item in placed]
    # A picture is known by its place, and clients choose the ids of items.
    earlier = [(f"previous_response_id[{i}]", item) for i, item in enumerate(before)]
    turns = conversation(body.instructions, [*earlier, *placed])
    call = _call(service, body, [turn.message for turn in turns])
    if body.truncation == "auto":
        check_pictures(service, list(sources_in(call.messages or ())))
    over = len(turns) - _fitting(service, call) if body.truncation == "auto" else 0
    if over:
        head = heads(call.messages or [])
        turns = [*turns[:head], *turns[head + over :]]
    messages = [turn.message for turn in turns]
    requests = requests_of(service, replace(call, messages=messages, names=names_of(turns)))
    return requests, own, [f"input: the oldest {over} messages are left out"] if over else []


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
    model, messages = service.model, messages_read(call.drawn, call.messages or [])
    thinking, _ = thinking_of(call.thinking)
    tools = tool_use(call.tools, call.tool_choice, model).tools
    canvas = call.drawn.canvas_length or model.config.canvas_length
    room = canvas if call.limit is None or call.limit == -1 else call.limit

    def fits(messages: Sequence[Any]) -> bool:
        pictures: PictureParts = []
        try:
            ids = prompt_ids(
                model.template,
                model.tokenizer,
                messages,
                thinking=thinking,
                tools=tools,
                check=lambda text: service.engine.check_length(text, "input"),
                pictures=pictures,
            )
        except ValueError:  # too long, or wrong, which is said where the prompt is made
            return False
        soft = sum(part["patches"].soft_tokens for _, part in pictures)
        return len(ids) + soft + room <= service.context

    return len(latest_turns(messages, fits))
