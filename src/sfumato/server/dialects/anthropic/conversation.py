"""Anthropic's messages, content blocks and tools as those of the chat template.

Tool calls and their results become what OpenAI's API has, which the text side checks. Errors name
blocks by their place in the body. Knows no sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfumato.refused import Refused
from sfumato.server.chat.call import check_count
from sfumato.server.dialects.anthropic.forms import AnthropicPrompt, ToolChoice
from sfumato.server.http.errors import Wording
from sfumato.server.http.request_body import check_fields
from sfumato.server.schemas.body import Unknown
from sfumato.server.settings import ServerSettings
from sfumato.text.messages import tool_name

_KNOWN = {
    *("name", "description", "input_schema", "strict", "type", "cache_control"),
    # Without an effect here.
    *("input_examples", "eager_input_streaming", "allowed_callers", "defer_loading"),
}
WORDING: Wording = {
    "tools[].function.parameters": "tools[].input_schema",
    **{f"tools[].function.{name}": f"tools[].{name}" for name in ("name", "description", "strict")},
}


def tools_of(given: list[dict[str, Any]] | None, ignored: Unknown | None) -> list[dict[str, Any]]:
    """ignored: records what a lenient server leaves out; None where unknown fields are refused.
    Raises Refused."""
    return [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(given or ())]


def _tool(tool: Mapping[str, Any], where: str, ignored: Unknown | None) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise Refused(
            f"{where}.type",
            "only tools with an input_schema are supported",
            "nothing runs here beside the model",
            code="unsupported",
        )
    check_fields(tool, _KNOWN, where, ignored)
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise Refused(f"{where}.input_schema", "must be a JSON schema object")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": schema}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def choice_of(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Raises Refused."""
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise Refused("tool_choice.name", "is missing", code="missing")
    return {"type": "function", "function": {"name": choice.name}}


BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that an agent makes anew for each request. Within the prompt
it would keep all that follows out of the cache."""
_KEYS = {
    "text": {"text", "citations"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
}
_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_UNSUPPORTED = {
    "image": "images are not supported yet",
    "document": "documents are not supported; send their text",
    "search_result": "search results are not supported; send their text",
}


@dataclass
class Conversation:
    """Messages of the chat template, and where each stands in the body."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        """Turns of one role that follow each other are one turn, as in Anthropic's API."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool":
            self.messages.append(message)
            self.places.append(place)
            return
        if message["role"] == "system":
            last["content"] += "\n\n"
        last["content"] += message["content"]
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Gives an Refused that is raised within the body's places."""
        try:
            yield
        except Refused as error:
            names = dict[str, str]()
            for number, place in enumerate(self.places):
                message = f"messages[{number}]"
                names |= {message: place, f"{message}.role": place}
                names[f"{message}.tool_call_id"] = f"{place}.tool_use_id"
            raise error.renamed(names) from None


def conversation(
    body: AnthropicPrompt, settings: ServerSettings, ignored: Unknown | None
) -> Conversation:
    """ignored: records what a lenient server leaves out; None where unknown fields are refused.
    Raises Refused."""
    check_count(body.messages, settings)
    reader = _Reader(ignored)
    made = Conversation()
    if system := reader.texts(body.system or "", "system"):
        made.add({"role": "system", "content": system}, "system")
    for number, message in enumerate(body.messages):
        reader.add(message, f"messages[{number}]", made)
    for message in made.messages:  # one text is the same prompt as in every other API
        if isinstance(message["content"], list) and len(message["content"]) < 2:
            message["content"] = "".join(part["text"] for part in message["content"])
    return made


class _Reader:
    """Reads messages; ignored: None where unknown fields are refused."""

    def __init__(self, ignored: Unknown | None) -> None:
        self._ignored = ignored

    def texts(self, content: Any, where: str) -> str:
        """A text, or the texts of blocks with an empty line between them."""
        if isinstance(content, str):
            return content
        blocks = self._blocks(content, where, ("text",))
        texts = [block["text"] for _, block in blocks]
        return "\n\n".join(text for text in texts if not text.startswith(BILLING))

    def add(self, message: Mapping[str, Any], where: str, made: Conversation) -> None:
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise Refused(f"{where}.role", "must be user, assistant or system")
        check_fields(message, ("role", "content"), where, self._ignored)
        content, where = message.get("content"), f"{where}.content"
        if role == "system":
            made.add({"role": role, "content": self.texts(content, where)}, where)
            return
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = list(self._blocks(content, where, _ROLES[role]))
        if role == "assistant":
            made.add(_of_assistant(blocks), where)
            return
        for here, block in blocks:  # results follow their calls, whatever stands before them
            if block["type"] == "tool_result":
                result = self.texts(block.get("content") or "", f"{here}.content")
                made.add(_result(block["tool_use_id"], result), here)
        parts = [
            {"type": "text", "text": block["text"]}
            for _, block in blocks
            if block["type"] == "text"
        ]
        if parts or not blocks:
            made.add({"role": role, "content": parts}, where)

    def _blocks(
        self, content: Any, where: str, kinds: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Blocks of those kinds, each with its place. Raises Refused."""
        if not isinstance(content, list):
            raise Refused(where, "must be text or a list of content blocks")
        for number, block in enumerate(content):
            here = f"{where}[{number}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if isinstance(kind, str) and kind in _UNSUPPORTED:
                raise Refused(here, _UNSUPPORTED[kind], code="unsupported")
            if not isinstance(kind, str) or kind not in kinds:
                raise Refused(f"{here}.type", f"must be {' or '.join(kinds)}")
            check_fields(block, _KEYS[kind] | {"type", "cache_control"}, here, self._ignored)
            _check_texts(block, kind, here)
            yield here, block


def _check_texts(block: Mapping[str, Any], kind: str, where: str) -> None:
    """Raises Refused."""
    texts = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_use": ("id", "name"),
        "tool_result": ("tool_use_id",),
    }
    for name in texts.get(kind, ()):
        if not isinstance(block.get(name), str):
            raise Refused(f"{where}.{name}", "must be text")
    if kind != "tool_use":
        return
    if not isinstance(block.get("input"), Mapping):
        raise Refused(f"{where}.input", "must be an object")
    tool_name(block["name"], f"{where}.name")


def _of_assistant(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Thoughts are left out: past ones never go back to the model."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block["text"] for _, block in blocks if block["type"] == "text"),
    }
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        for _, block in blocks
        if block["type"] == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}
