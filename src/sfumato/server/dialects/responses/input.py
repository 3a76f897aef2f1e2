"""The input of a response: its items, checked and in the shape in which they are also kept; what it
refers to; its tools; and the messages of a chat that all of that becomes.

Messages, function calls and their outputs stay; thoughts go, since no past thought returns to the
model; references become what they refer to, looked up once, and bounded as a body is."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.openai_chat import UNSUPPORTED
from sfumato.server.response_store import Item, Missing, ResponseStore, Stored
from sfumato.server.schemas import Unknown
from sfumato.text.messages import tool_name


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
    """Characters of the item's texts."""
    texts = [part.get("text", "") for part in item.get("content", ())]
    return len(item.get("arguments", "")) + len(item.get("output", "")) + sum(map(len, texts))


Find = Callable[[str], Item]
"""An item by its id; raises Missing."""

LONGEST_ID = 128
_ROLES = ("user", "assistant", "system", "developer")
_COMMON = {"type", "id", "status", "phase"}
_ORIGIN = {"namespace", "caller", "created_by"}  # what hosted tools add to calls
_KEYS = {
    "message": _COMMON | {"role", "content"},
    "function_call": _COMMON | _ORIGIN | {"call_id", "name", "arguments", "async"},
    "function_call_output": _COMMON | _ORIGIN | {"call_id", "output", "name"},
    "item_reference": {"type", "id"},
}
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
    if not isinstance(kind, str) or kind not in _KEYS:
        kinds = ", ".join((*_KEYS, "reasoning"))
        raise Refused(f"{where}.type", f"must be one of {kinds}", code="unsupported")
    unknown.check(item, _KEYS[kind], where)
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
        return head | {"output": "".join(_texts(item.get("output"), f"{where}.output"))}
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
    texts = _texts(item.get("content"), f"{where}.content")
    made = _output if role == "assistant" else _input
    return _message(role, [made(text) for text in texts], own)


def _message(role: str, content: list[Item], own: str) -> Item:
    return {"id": own, "type": "message", "status": "completed", "role": role, "content": content}


def _input(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": []}


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a content: a text, or parts. Raises Refused."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Refused(where, "must be text or a list of parts")
    return [_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


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

_FUNCTION = ("name", "description", "parameters", "strict")
_DEFAULTS: Tool = {"description": None, "parameters": None, "strict": False}
_KNOWN = {
    *("type", *_FUNCTION),
    # Without an effect here.
    *("defer_loading", "allowed_callers", "async", "output_schema"),
}
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
    unknown.check(tool, _KNOWN, where)
    return {"type": "function", "function": _known(tool)}


def _known(tool: Mapping[str, Any]) -> Tool:
    return {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}


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


def shown_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any]:
    """tool_choice, after it was checked, as the response repeats it."""
    if isinstance(choice, Mapping):
        return {"type": "function", "name": choice["name"]}
    return choice or "auto"


Message = dict[str, Any]

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
            output = {"role": "tool", "tool_call_id": name, "content": item["output"]}
            callers[name].outputs.append(Turn(output, where))
    if not turns:
        raise Refused("input", "holds nothing but thoughts", "add a message")
    return [each for turn in turns for each in (turn, *turn.outputs)]


def _add_message(turns: list[Turn], item: Item, where: str, last: Turn | None) -> None:
    """last: the assistant's turn that is still open."""
    role = "system" if item["role"] == "developer" else item["role"]
    texts = [part["text"] for part in item["content"]]
    if role == "assistant" and last is not None and last.message.get("tool_calls"):
        # Outputs follow the message with their calls, so text behind calls joins that message.
        last.message["content"] = (last.message.get("content") or "") + "".join(texts)
        return
    content: Any = "".join(texts)
    if len(texts) > 1 and role == "user":
        content = [{"type": "text", "text": text} for text in texts]
    turns.append(Turn({"role": role, "content": content}, where))


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
