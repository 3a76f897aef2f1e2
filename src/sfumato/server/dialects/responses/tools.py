"""The tools of a response, which are flat, in the shape that chats have; and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.shared.unknown_fields import check_fields
from sfumato.server.schemas.body import Unknown

Tool = dict[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_DEFAULTS: Tool = {"description": None, "parameters": None, "strict": False}
_KNOWN = {
    *("type", *_FUNCTION),
    # Without an effect here.
    *("defer_loading", "allowed_callers", "async", "output_schema"),
}
_HOSTED = "hosted tools are not supported; only functions, which the client runs itself"


def nested(tools: Sequence[Mapping[str, Any]] | None, ignored: Unknown | None) -> list[Tool] | None:
    """Chat's tools. ignored: gets the names of unknown fields; None where they are refused. Raises
    Refused; what is wrong inside a function is found where chat's are checked."""
    if tools is None:
        return None
    return [_nested(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools)]


def _nested(tool: Mapping[str, Any], where: str, ignored: Unknown | None) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        name = f"{where}.type"
        raise Refused(name, f"must be function: {_HOSTED}", code="unsupported")
    check_fields(tool, _KNOWN, where, ignored)
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


def shown(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """The tools as the response repeats them: without the fields that are ignored."""
    return [{"type": "function", **_DEFAULTS, **_known(tool)} for tool in tools or ()]


def shown_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any]:
    """tool_choice, after it was checked, as the response repeats it."""
    if isinstance(choice, Mapping):
        return {"type": "function", "name": choice["name"]}
    return choice or "auto"
