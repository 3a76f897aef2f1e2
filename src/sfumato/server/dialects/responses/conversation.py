"""The items of a response's input as messages of a chat, and the turns that fit the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from sfumato.server.http.errors import bad_request
from sfumato.server.response_store import Item

Message = dict[str, Any]


def messages_of(instructions: str | None, items: Sequence[Item], own: int) -> list[Message]:
    """own: how many of the items, the last ones, the body has; the others are of the responses
    before. Raises ApiError."""
    first = len(items) - own
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        where = f"input[{number - first}]" if number >= first else "previous_response_id"
        if item["type"] == "message":
            _add_message(messages, item)
        elif item["type"] == "function_call":
            _add_call(messages, item)
        elif item["type"] == "function_call_output":
            _add_output(messages, item, where)
    if not messages:
        raise bad_request("input: holds nothing but thoughts; add a message", "input")
    return messages


def _add_message(messages: list[Message], item: Item) -> None:
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
    messages.append({"role": role, "content": content})


def _add_call(messages: list[Message], item: Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_output(messages: list[Message], item: Item, where: str) -> None:
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
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def latest_turns(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> list[Message]:
    """The messages without the oldest turns, as few of them as makes the others fit: the system's
    first messages, and those from a user's message on. Where no turn fits, the last one."""
    head = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    starts = [i for i, each in enumerate(messages) if each["role"] == "user" and i > head]
    shorter: list[list[Message]] = [[*messages[:head], *messages[at:]] for at in starts]
    if not shorter or fits(messages):
        return list(messages)
    at = bisect_left(range(len(shorter)), True, key=lambda i: fits(shorter[i]))
    return shorter[min(at, len(shorter) - 1)]
