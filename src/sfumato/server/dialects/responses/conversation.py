"""The items of a response's input as messages of a chat, and the turns that fit the context."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfumato.server.http.errors import ApiError, bad_request
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
        """Gives an ApiError that is raised within the body's places."""
        try:
            yield
        except ApiError as error:
            match = _INDEX.match(error.message)
            if match and int(match[1]) < len(self.places):
                name = self._name(match)
                error.message = name + error.message[match.end() :]
                if error.param is not None:
                    error.param = _INDEX.sub(lambda _: name, error.param, count=1)
            raise

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
    """items: each with its place. Raises ApiError."""
    talk = Conversation()
    if instructions is not None:
        talk.add({"role": "system", "content": instructions}, _INSTRUCTIONS)
    for where, item in items:
        if item["type"] == "message":
            _add_message(talk, item, where)
        elif item["type"] == "function_call":
            _add_call(talk, item, where)
        elif item["type"] == "function_call_output":
            _add_output(talk, item, where)
    if not talk.messages:
        raise bad_request("input: holds nothing but thoughts; add a message", "input")
    return talk


def _add_message(talk: Conversation, item: Item, where: str) -> None:
    messages = talk.messages
    role = "system" if item["role"] == "developer" else item["role"]
    texts = [part["text"] for part in item["content"]]
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("tool_calls"):
        # Outputs follow the message with their calls, so text behind calls joins that message.
        last["content"] = (last.get("content") or "") + "".join(texts)
        return
    content: Any = "".join(texts)
    if len(texts) > 1 and role == "user":
        content = [{"type": "text", "text": text} for text in texts]
    talk.add({"role": role, "content": content}, where)


def _add_call(talk: Conversation, item: Item, where: str) -> None:
    messages = talk.messages
    if not messages or messages[-1]["role"] != "assistant":
        talk.add({"role": "assistant", "content": None}, where)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
    talk.places[-1].calls.append(where)


def _add_output(talk: Conversation, item: Item, where: str) -> None:
    messages = talk.messages
    at = len(messages) - 1
    while at >= 0 and messages[at]["role"] == "tool":
        at -= 1
    calls = messages[at].get("tool_calls", ()) if at >= 0 else ()
    if not any(call["id"] == item["call_id"] for call in calls):
        raise bad_request(
            f"{where}.call_id: {item['call_id']!r} is of no function_call right before it",
            f"{where}.call_id",
        )
    content = item["output"]
    talk.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, where)


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
