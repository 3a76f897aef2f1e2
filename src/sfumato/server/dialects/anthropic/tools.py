"""Anthropic's tools and tool_choice as those of OpenAI's API, which the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.shared.unknown_fields import check_fields
from sfumato.server.http.errors import Wording
from sfumato.server.schemas.anthropic import ToolChoice
from sfumato.server.schemas.body import Unknown

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
