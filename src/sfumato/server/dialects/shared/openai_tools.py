"""OpenAI's tools and tool_choice as the engine takes them, and warnings about a reply's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.api import Reply
from sfumato.engine import ServedModel
from sfumato.refused import Refused
from sfumato.text.messages import tool_name

NO_CALLS = "this model's vocabulary has no tool calls"
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ToolUse:
    """What tools and tool_choice ask for."""

    tools: list[dict[str, Any]] | None  # that the prompt describes
    opening: str | None = None  # what the reply has to begin with
    name: str | None = None  # of the only tool that may be called
    banned: tuple[int, ...] = ()  # tokens that begin a call, where none may be made


def tool_use(
    tools: list[dict[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    model: ServedModel,
) -> ToolUse:
    """Raises Refused."""
    names = [_tool_name(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
    opener = call_token(model)
    if choice == "none":
        return ToolUse(None, banned=() if opener is None else (opener,))
    if choice is None or choice == "auto":
        return ToolUse(tools or None)
    if choice == "required":
        if not names:
            raise Refused("tool_choice", "required needs tools to choose from")
        name = names[0] if len(names) == 1 else None
    else:
        name = _chosen(choice)
        if name not in names:
            raise Refused("tool_choice", f"{name[:100]!r} is not among the tools")
    if opener is None:
        raise Refused("tool_choice", NO_CALLS)
    return ToolUse(tools, call_opening(model, name), name)


def call_opening(model: ServedModel, name: str | None) -> str:
    """How a call of the tool of that name begins; None: of any tool."""
    return f"{model.template.markers.call_open}call:{'' if name is None else f'{name}{{'}"


def call_token(model: ServedModel) -> int | None:
    """The token that begins a call; None where the vocabulary has none."""
    marker = model.template.markers.call_open
    return model.tokenizer.token_id(marker) if marker else None


def ignored_tools(tools: Tools, model: ServedModel) -> list[str]:
    """A warning where tools are sent to a model that cannot call them."""
    ignored = tools and call_token(model) is None
    return [f"tools: ignored, since {NO_CALLS}"] if ignored else []


def unknown_calls(tools: Tools, reply: Reply) -> list[str]:
    """A warning for each call of a tool that the request does not have: the model writes the names
    itself, but for that of a tool that has to be called."""
    names = {tool["function"]["name"] for tool in tools or ()}
    unknown = [call.name for call in reply.tool_calls if names and call.name not in names]
    return [f"the call of {name!r} is of none of the tools" for name in unknown]


def _tool_name(tool: Mapping[str, Any], where: str) -> str:
    if tool.get("type") != "function":
        raise Refused(f"{where}.type", 'only "function" is supported', code="unsupported")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return tool_name(name, f"{where}.function.name")


def _chosen(choice: str | Mapping[str, Any]) -> str:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise _no_choice()


def _no_choice() -> Refused:
    return Refused(
        "tool_choice",
        'must be none, auto, required, or {"type": "function", "function": {"name": …}}',
    )
