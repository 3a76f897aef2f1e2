"""What callers send, checked: messages and tools in the shape that chat templates read.

Knows no template and no token. What these functions return is new, plain JSON data: a template gets
no object with methods, and the caller's messages are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.refused import Refused
from sfumato.text.calls import TOOL_NAME
from sfumato.text.jsonscan import JsonTooLarge, extent, unicode_fault
from sfumato.text.markers import NO_MARKERS, ChatMarkers
from sfumato.weights.errors import quoted

ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 64
"""Levels of nesting in arguments and tool schemas."""
MOST_VALUES = 2**17
"""In a conversation's arguments that are sent as texts of JSON, all together."""


_OF_FUNCTIONS = (  # what a tool's function may have beside its name
    ("description", str, "a text"),
    ("parameters", dict, "a JSON schema object"),
    ("strict", bool, "true or false"),
)


PictureParts = list[tuple[str, Mapping[str, Any]]]
"""Parts of messages that are pictures, in order, each with its place in the request."""


def check_messages(
    messages: Sequence[Mapping[str, Any]],
    first: int = 0,
    markers: ChatMarkers = NO_MARKERS,
    pictures: PictureParts | None = None,
) -> list[dict[str, Any]]:
    """A clean copy of `messages`; first: the number that errors give the first of them; markers:
    those of the thoughts to leave out; pictures: gets the parts of pictures (None: there may be
    none).

    Each message has a `role` of ROLES and a `content`: text, or a list of `{"type": "text",
    "text": …}` and, in a user's or a tool's, `{"type": "image", …}`, of which the copy keeps the
    type alone. Pictures of tools' results stand in a user's message behind them, since templates
    show pictures nowhere else. An assistant's may have `tool_calls` as in OpenAI's API, and then
    no content; its thoughts are left out, because past thoughts never go back to the model. A
    tool's answers one of them by `tool_call_id` or `name`; the result has both. Other keys are left
    out.

    Raises:
        Refused: naming the message by its index, and the field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise Refused("messages", f"must be a list, not {type(messages).__name__}")
    if not messages:
        raise Refused("messages", "is empty", "send at least one message")
    checked: list[dict[str, Any]] = []
    budget, of_tools = _ValueBudget(), list[dict[str, str]]()
    for i, message in enumerate(messages, first):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise Refused(where, "must be an object with a role and a content")
        role = message.get("role")
        if role not in ROLES:
            raise Refused(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {quoted(role)}")
        clean: dict[str, Any] = {"role": role}
        if role != "tool" and of_tools:
            checked.append({"role": "user", "content": of_tools})
            of_tools = []
        calls = message.get("tool_calls")
        if calls is not None and role != "assistant":
            raise Refused(f"{where}.tool_calls", "only an assistant's message has tool calls")
        if calls is not None and (made := _tool_calls(calls, f"{where}.tool_calls", budget)):
            clean["tool_calls"] = made
        if message.get("content") is not None or "tool_calls" not in clean:
            clean["content"] = _content(
                message.get("content"), role, f"{where}.content", markers, pictures
            )
        if role == "tool":
            of_tools += _without_pictures(clean)
            clean |= _answered_call(message, checked, where)
        checked.append(clean)
    return [*checked, {"role": "user", "content": of_tools}] if of_tools else checked


def _without_pictures(message: dict[str, Any]) -> list[dict[str, str]]:
    """Makes the content of a tool's message a text; returns the parts that are pictures."""
    content = message["content"]
    if isinstance(content, str):
        return []
    message["content"] = "".join(part.get("text", "") for part in content)
    return [part for part in content if part["type"] == "image"]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A clean copy of `tools`: objects `{"type": "function", "function": {"name": …, …}}`.

    Raises:
        Refused: naming the tool by its index, and the field.
    """
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise Refused("tools", f"must be a list, not {type(tools).__name__}")
    checked = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        clean = _plain(tool, where)
        if not isinstance(clean, dict) or clean.get("type") != "function":
            raise Refused(where, 'must be an object of "type": "function"')
        function = clean.get("function")
        if not isinstance(function, dict):
            raise Refused(f"{where}.function", "must be an object")
        tool_name(function.get("name"), f"{where}.function.name")
        for name, kind, what in _OF_FUNCTIONS:
            if not isinstance(function.get(name), kind | None):
                raise Refused(f"{where}.function.{name}", f"must be {what}")
        function["description"] = function.get("description") or ""
        checked.append(clean)
    return checked


def without_thoughts(text: str, markers: ChatMarkers) -> str:
    """An assistant's past text without its thoughts, an unclosed one too."""
    if not markers.thought_open:
        return text
    first, *rest = text.split(markers.thought_close) if markers.thought_close else [text]
    parts = (first, *(part.removeprefix(markers.thought_footer) for part in rest))
    return "".join(part.split(markers.thought_open)[0] for part in parts)


def _content(
    content: Any, role: str, where: str, markers: ChatMarkers, pictures: PictureParts | None
) -> str | list[dict[str, str]]:
    if role != "assistant":
        markers = NO_MARKERS
    if isinstance(content, str):
        return without_thoughts(_plain(content, where), markers)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        kind = "null" if content is None else type(content).__name__
        raise Refused(where, f"must be text or a list of parts, not {kind}")
    parts = list[dict[str, str]]()
    for i, part in enumerate(content):
        here = f"{where}[{i}]"
        if not isinstance(part, Mapping) or "type" not in part:
            raise Refused(here, 'must be an object such as {"type": "text", "text": "…"}')
        if part["type"] == "image" and pictures is not None and role in ("user", "tool"):
            pictures.append((here, part))
            parts.append({"type": "image"})
            continue
        if part["type"] != "text":
            raise Refused(f"{here}.type", f"only 'text' is supported, not {quoted(part['type'])}")
        if not isinstance(part.get("text"), str):
            raise Refused(f"{here}.text", "must be text")
        parts.append({"type": "text", "text": _plain(part["text"], f"{here}.text")})
    if role == "tool" and any(part["type"] == "image" for part in parts):
        return parts
    if role != "user":
        # Templates take an object for these roles and show it as Python prints it, or a channel
        # opens in one part and closes in another.
        return without_thoughts("".join(part["text"] for part in parts), markers)
    return parts


def tool_name(name: Any, where: str) -> str:
    """A tool's name, as a call of it can be written and read back.

    Raises:
        Refused: it is none.
    """
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise Refused(
            where,
            "must be a text of 1 to 128 characters out of A-Z, a-z, 0-9, '_', '.' and '-', "
            f"not {quoted(name)}",
        )
    return str.__str__(name)


@dataclass
class _ValueBudget:
    """How many values may still be decoded from texts."""

    left: int = MOST_VALUES

    def decoded(self, text: str) -> Any:
        """Raises JsonTooLarge for too much of it, and ValueError for what is no JSON."""
        self.left -= extent(text.encode(), most_depth=MAX_DEPTH).values
        if self.left < 0:
            raise JsonTooLarge(f"all arguments together hold more than {MOST_VALUES:,} values")
        return json.loads(text)


def _tool_calls(calls: Any, where: str, budget: _ValueBudget) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise Refused(where, "must be a list")
    checked = []
    for i, call in enumerate(calls):
        here = f"{where}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise Refused(f"{here}.function", "must be an object with a name and arguments")
        if call.get("type", "function") != "function":
            raise Refused(f"{here}.type", 'must be "function"')
        name = tool_name(function.get("name"), f"{here}.function.name")
        arguments = function.get("arguments")
        if arguments in (None, ""):
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = budget.decoded(arguments)
            except JsonTooLarge as error:
                raise Refused(f"{here}.function.arguments", str(error)) from error
            except ValueError as error:
                raise Refused(
                    f"{here}.function.arguments", f"must be JSON ({str(error)[:80]})"
                ) from error
        if not isinstance(arguments, Mapping):
            raise Refused(f"{here}.function.arguments", "must be a JSON object")
        clean = {
            "type": "function",
            "function": {
                "name": name,
                "arguments": _plain(arguments, f"{here}.function.arguments"),
            },
        }
        if call.get("id") is not None:
            if not isinstance(call["id"], str):
                raise Refused(f"{here}.id", "must be a text")
            clean["id"] = call["id"]
        checked.append(clean)
    return checked


def _answered_call(
    message: Mapping[str, Any], before: Sequence[Mapping[str, Any]], where: str
) -> dict[str, str]:
    """The `name` and, where given, the `tool_call_id` of the call that a tool message answers."""
    at = len(before) - 1
    while at >= 0 and before[at]["role"] == "tool":
        at -= 1
    calls = before[at].get("tool_calls", []) if at >= 0 else []
    if not calls:
        raise Refused(f"{where}.role", "a tool's message must follow an assistant's tool_calls")
    names = [call["function"]["name"] for call in calls]
    by_id = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    call_id, name = message.get("tool_call_id"), message.get("name")
    if call_id is not None:
        if not isinstance(call_id, str) or (call_id not in by_id and name is None):
            raise Refused(f"{where}.tool_call_id", f"{quoted(call_id)} is no call's id")
        name = by_id.get(call_id, name)
    if name is None and len(names) == 1:
        name = names[0]
    if not isinstance(name, str) or name not in names:
        raise Refused(
            f"{where}.name",
            "must say by name or tool_call_id which call is answered, one of "
            f"{quoted(', '.join(names))}",
        )
    return {"name": name} | ({"tool_call_id": call_id} if call_id is not None else {})


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """`value` rebuilt of JSON types, every text in it valid Unicode."""
    if depth > MAX_DEPTH:
        raise Refused(where[:200], f"is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if fault := unicode_fault(value):
            raise Refused(where, fault)
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise Refused(where, f"has the key {quoted(key)}, which is no text")
        return {
            _plain(key, where, depth): _plain(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise Refused(where, f"must be JSON data, not {type(value).__name__}")
