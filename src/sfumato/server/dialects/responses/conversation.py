"""The items of a response's input as messages of a chat, and the turns that fit the context."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfumato.refused import Refused
from sfumato.server.response_store import Item

Message = dict[str, Any]

_INSTRUCTIONS = "instructions"


_INDEX = re.compile(
    r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?|(\.tool_call_id|\.content)(?!\w))?"
)
_NAMES = {".tool_call_id": ".call_id", ".content": ".output"}  # of messages that are outputs


@dataclass(frozen=True)
class Place:
    """Where a message stands in the body, and where its calls do."""

    name: str
    calls: list[str] = field(default_factory=list)


@dataclass
class Conversation:
    """Messages of the chat template, each with its place."""

    messages: list[Message] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def add(self, message: Message, place: str) -> None:
        self.messages.append(message)
        self.places.append(Place(place))

    def without(self, count: int) -> Conversation:
        """The conversation without so many messages behind the system's first ones."""
        head = _head(self.messages)
        at = head + count
        return Conversation(
            [*self.messages[:head], *self.messages[at:]], [*self.places[:head], *self.places[at:]]
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Gives an Refused that is raised within the body's places."""
        try:
            yield
        except Refused as error:
            raise error.about(*map(self._place, error.fields)) from None

    def _place(self, field: str) -> str:
        match = _INDEX.match(field)
        if match is None or int(match[1]) >= len(self.places):
            return field
        return self._name(match) + field[match.end() :]

    def _name(self, match: re.Match[str]) -> str:
        number, call, of_output = int(match[1]), match[2], match[3] or ""
        place = self.places[number]
        if call is not None:
            return place.calls[int(call)] if int(call) < len(place.calls) else place.name
        is_output = self.messages[number]["role"] == "tool"
        if place.name == _INSTRUCTIONS:
            return place.name
        return place.name + (_NAMES.get(of_output, "") if is_output else of_output)


def conversation(instructions: str | None, items: Iterable[tuple[str, Item]]) -> Conversation:
    """items: each with its place. Raises Refused."""
    reader = _Reader()
    if instructions is not None:
        reader.talk.add({"role": "system", "content": instructions}, _INSTRUCTIONS)
    for where, item in items:
        if item["type"] == "message":
            reader.add_message(item, where)
        elif item["type"] == "function_call":
            reader.add_call(item, where)
        elif item["type"] == "function_call_output":
            reader.add_output(item, where)
    if not reader.talk.messages:
        raise Refused("input", "holds nothing but thoughts", "add a message")
    return reader.conversation()


class _Reader:
    """Makes messages of items. The output of a call stands right behind the message with that call,
    as the chat template has it, even where a user has written in between."""

    def __init__(self) -> None:
        self.talk = Conversation()  # without outputs
        self._callers: dict[str, int] = {}  # a call's id → the number of its message
        self._outputs: dict[int, Conversation] = {}  # that number → its outputs

    def conversation(self) -> Conversation:
        made = Conversation()
        for number, message in enumerate(self.talk.messages):
            outputs = self._outputs.get(number, Conversation())
            made.messages += [message, *outputs.messages]
            made.places += [self.talk.places[number], *outputs.places]
        return made

    def add_message(self, item: Item, where: str) -> None:
        role = "system" if item["role"] == "developer" else item["role"]
        texts = [part["text"] for part in item["content"]]
        last = self._open_turn()
        if role == "assistant" and last is not None and last.get("tool_calls"):
            # Outputs follow the message with their calls, so text behind calls joins that message.
            last["content"] = (last.get("content") or "") + "".join(texts)
            return
        content: Any = "".join(texts)
        if len(texts) > 1 and role == "user":
            content = [{"type": "text", "text": text} for text in texts]
        self.talk.add({"role": role, "content": content}, where)

    def add_call(self, item: Item, where: str) -> None:
        talk = self.talk
        if self._open_turn() is None:
            talk.add({"role": "assistant", "content": None}, where)
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        talk.messages[-1].setdefault("tool_calls", []).append(call)
        talk.places[-1].calls.append(where)
        self._callers[item["call_id"]] = len(talk.messages) - 1

    def add_output(self, item: Item, where: str) -> None:
        """Raises Refused."""
        name = item["call_id"]
        if name not in self._callers:
            raise Refused(f"{where}.call_id", f"{name!r} is of no function_call before it")
        outputs = self._outputs.setdefault(self._callers[name], Conversation())
        outputs.add({"role": "tool", "tool_call_id": name, "content": item["output"]}, where)

    def _open_turn(self) -> Message | None:
        """The last message, where it is the assistant's and none of its calls has an output."""
        messages = self.talk.messages
        is_open = messages and len(messages) - 1 not in self._outputs
        return messages[-1] if is_open and messages[-1]["role"] == "assistant" else None


def latest_turns(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> list[Message]:
    """The messages without the oldest turns, as few of them as makes the others fit: the system's
    first messages, and those from a user's message on. Where no turn fits, the last one."""
    head = _head(messages)
    starts = [i for i, each in enumerate(messages) if each["role"] == "user" and i > head]
    shorter: list[list[Message]] = [[*messages[:head], *messages[at:]] for at in starts]
    if not shorter or fits(messages):
        return list(messages)
    at = bisect_left(range(len(shorter)), True, key=lambda i: fits(shorter[i]))
    return shorter[min(at, len(shorter) - 1)]


def _head(messages: Sequence[Message]) -> int:
    """How many messages of the system come first."""
    return next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
