"""What a chat asks for, as the engine takes it: tools, thinking, the end of the reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sfumato.api import Reply
from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.engine import Pooling, Request, ServedModel
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.chat.grammars import call_grammar
from sfumato.server.schemas.json_schemas import EFFORTS
from sfumato.text.markers import ChatMarkers
from sfumato.text.messages import check_messages, tool_name
from sfumato.text.prompt import check_long_texts
from sfumato.text.tokenizer import Marker

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


@dataclass(frozen=True)
class Thinking:
    """What a body says of thinking; None: nothing."""

    effort: str | None = None
    enabled: bool | None = None  # takes precedence over the effort
    most: int | None = None  # tokens; takes precedence over those of the effort
    # The fields, as errors name them.
    effort_field: str = "reasoning_effort"
    enabled_field: str = "chat_template_kwargs"


def thinking_of(given: Thinking, continued: bool = False) -> tuple[bool, int | None]:
    """Whether the model thinks, and for how many tokens at most. continued: whether the reply
    continues a message. Raises Refused."""
    effort, field = given.effort, given.effort_field
    if effort is not None and effort not in EFFORTS:
        raise Refused(field, f"must be one of {', '.join(EFFORTS)}")
    budget = None if effort is None else EFFORTS[effort]
    thinking = given.enabled if given.enabled is not None else effort is not None and budget != 0
    if thinking and continued:
        name = given.enabled_field if effort is None else field
        raise Refused(
            name,
            "an answer that is continued is not thought about first",
            "ask for no thinking, or set continue_final_message to false",
        )
    if given.most is not None:
        budget = given.most
    return bool(thinking), budget if thinking and budget != 0 else given.most


_BESIDE = ("stop", "canvas", "prediction")  # fields of a request, which may say what a reply holds


def reply_ends(
    use: ToolUse,
    model: ServedModel,
    is_single: bool,
    answer: GrammarSource | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields `grammar` and `stop` of a Request. is_single: whether one call is the most;
    answer: what a reply without calls has to match; fields: the request's others. Raises
    Refused."""
    close = model.template.markers.call_close
    beside = {name: fields.get(name) for name in _BESIDE}
    given = {**fields["sampler"].beside_grammar, **beside}
    may_hold = exclusions.refusal(exclusions.GRAMMAR, given) is None
    required = use.opening is not None
    grammar = call_grammar(use.tools, model, use.name, required, is_single, answer, may_hold)
    canvas = fields.get("canvas")
    stop, is_read = fields["stop"], canvas is not None and canvas.read_only
    if is_single and use.tools and grammar is None and close and not is_read:
        # A call that is cut at its end is complete, and the only one.
        stop = [*(stop or ()), Marker(close)]
    return {"grammar": grammar, "stop": stop}


def encoded_only(request: Request) -> Request:
    """The request without its reply, which is empty."""
    return replace(request, opening=None, grammar=None, pooling=Pooling("last"), max_tokens=0)


def continuation(
    messages: list[dict[str, Any]],
    wanted: bool | None,
    opened: bool | None,
    check: Callable[[str, str], None],
    markers: ChatMarkers,
) -> tuple[list[dict[str, Any]], str | None]:
    """The messages that the prompt shows complete, and the text of the last one where the reply
    continues that message: an assistant's.

    wanted, opened: the body's continue_final_message and add_generation_prompt; check: raises for a
    text that is too long for any context, and a field; markers: of the chat format. Raises
    Refused.
    """
    is_assistant = messages[-1]["role"] == "assistant"
    if wanted and opened:
        raise Refused(
            "continue_final_message",
            "a message is continued, or the model's turn is opened",
            "set add_generation_prompt to false",
        )
    if wanted and not is_assistant:
        raise Refused("continue_final_message", "the last message must be an assistant's")
    if opened is False and (not is_assistant or wanted is False):
        raise Refused(
            "add_generation_prompt", "must be true where no assistant's message is continued"
        )
    if not is_assistant or wanted is False:
        return messages, None
    where = f"messages[{len(messages) - 1}]"
    if messages[-1].get("tool_calls"):
        raise Refused(
            f"{where}.tool_calls", "cannot be continued", "send the tools' answers after them"
        )
    if len(messages) == 1:
        raise Refused("messages", "an assistant's message can only be continued after a user's")
    check_long_texts(messages[-1], lambda text: check(text, "messages"))
    text: str = check_messages(messages[-1:], len(messages) - 1, markers)[0]["content"]
    return messages[:-1], text or None
