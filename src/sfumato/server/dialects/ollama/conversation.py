"""Ollama's messages as messages of the chat template. Knows no sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.shared.unknown_fields import check_fields
from sfumato.server.schemas.body import Unknown
from sfumato.server.settings import ServerSettings

_KEYS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "thinking", "tool_calls"},
    "tool": {"content", "tool_name", "name", "tool_call_id"},
}


def conversation(
    given: Sequence[Mapping[str, Any]], settings: ServerSettings, ignored: Unknown | None
) -> list[dict[str, Any]]:
    """ignored: records what a lenient server leaves out; None where unknown fields are refused.
    Raises Refused."""
    if len(given) > settings.max_messages:
        raise Refused(
            "messages",
            f"{len(given)} of them, and this server takes {settings.max_messages}",
            "leave out old ones, or raise --max-messages",
        )
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given):
        messages.append(_message(message, f"messages[{number}]", ignored, messages))
    return messages


def _message(
    message: Mapping[str, Any],
    where: str,
    ignored: Unknown | None,
    before: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """ignored: None where unknown fields are refused."""
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in _KEYS:
        raise Refused(f"{where}.role", "must be one of system, user, assistant, tool")
    if message.get("images") not in (None, []):
        name = f"{where}.images"
        raise Refused(name, "images are not supported yet", code="unsupported")
    known = _KEYS[role] | {"role", "images"}
    check_fields(message, known, where, ignored)
    if not isinstance(message.get("content"), str | None):
        raise Refused(f"{where}.content", "must be text")
    clean: dict[str, Any] = {"role": role, "content": message.get("content")}
    if role == "assistant":
        clean["content"] = clean["content"] or ""
        if message.get("tool_calls") is not None:
            clean["tool_calls"] = message["tool_calls"]
    elif role == "tool":
        called = message.get("tool_name") or message.get("name")
        if message.get("tool_call_id") is not None and _have_ids(before):
            clean["tool_call_id"] = message["tool_call_id"]
        if called is None and "tool_call_id" not in clean:
            called = _called(before)
        clean["name"] = called
    return clean


def _have_ids(before: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last calls have ids: LiteLLM leaves them out of calls and sends them in results,
    where they then say nothing."""
    turns = (message for message in reversed(before) if message["role"] != "tool")
    last = next(turns, None)
    calls = None if last is None else last.get("tool_calls")
    if not isinstance(calls, list):
        return True  # no calls: what the id is worth is not known here
    return any(isinstance(call, Mapping) and call.get("id") is not None for call in calls)


def _called(before: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the first call that has no result yet: clients may leave out which call a result
    belongs to, and send results in the order of the calls."""
    results = 0
    for message in reversed(before):
        if message["role"] != "tool":
            break
        results += 1
    calls = before[-1 - results].get("tool_calls") if len(before) > results else None
    if not isinstance(calls, list) or len(calls) <= results:
        return None
    function = calls[results].get("function") if isinstance(calls[results], Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
