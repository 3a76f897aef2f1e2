"""`ChatCall`: what a body asks for, whatever its words; and the engine's requests for it.

A dialect maps the names of its fields to a `ChatCall`. The order of the checks, what a reply may
hold beside calls, prompts, lengths and seeds are decided here, once for all dialects; and so are
prompts that are no conversation: texts, token ids, both in one list, and text before a suffix.
Knows no dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sfumato.api import Reply
from sfumato.diffusion.constraints.call_grammar import CallSource, CallTool, Source
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.diffusion.constraints.hole import Hole
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Pooling, Prompt, PromptScoring, Request, ServedModel, new_id
from sfumato.media.part import PictureSource
from sfumato.options import exclusions
from sfumato.refused import Refused, TooLarge
from sfumato.server.chat import pictures
from sfumato.server.chat.pictures import MixedPrompt
from sfumato.server.chat.sampling import (
    canvas_fields,
    check_size,
    given_in,
    grammar_of,
    longest,
    request_fields,
    seeds_of,
)
from sfumato.server.http.errors import ApiError
from sfumato.server.schemas import EFFORTS, Sampling
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.messages import check_messages, tool_name
from sfumato.text.prompt import check_long_texts
from sfumato.text.tokenizer import Marker

RawPrompt = Prompt | list[int]
"""A prompt without messages: with its pictures, or ids alone."""

Message = dict[str, Any]
"""In the roles and with the fields of the chat template."""


@dataclass(frozen=True)
class Thinking:
    """What a body says of thinking; None: nothing."""

    effort: str | None = None
    enabled: bool | None = None  # takes precedence over the effort
    most: int | None = None  # tokens; takes precedence over those of the effort
    # The fields, as errors name them.
    effort_field: str = "reasoning_effort"
    enabled_field: str = "chat_template_kwargs"


@dataclass(frozen=True)
class ChatCall:
    """What a body asks for."""

    endpoint: str
    drawn: Sampling  # how replies are drawn, held and sent: the fields that all bodies have
    messages: list[Message] | None = None  # None: each prompt is token ids
    # What the body calls parts of the messages, by the names that they have here.
    names: Mapping[str, str] = field(default_factory=dict)
    # Whether the reply may continue the last message; and the body's continue_final_message and
    # add_generation_prompt.
    continues: bool = True
    wanted: bool | None = None
    opened: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    is_single: bool = False  # one call at most
    # What the reply has to match by the dialect's own fields; may raise Refused.
    forms: Iterable[GrammarSource] = ()
    thinking: Thinking = field(default_factory=Thinking)
    logprobs: bool = False
    alternatives: int | None = None  # tokens that log probabilities name at each position
    prediction: PredictedText | None = None
    scoring: PromptScoring | None = None
    # Fields of a text with holes, which has the length that its holes have.
    holes: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None  # tokens of a reply; None and -1: what fits; 0: the prompt alone
    is_most: bool = False  # whether the limit is only the most that the client would take
    count: int = 1  # replies to each prompt
    user: str | None = None
    sized: tuple[str, ...] = ()  # fields that the size of the answer depends on, if bounded


def requests_of(
    service: Service, call: ChatCall, prompts: Iterable[RawPrompt] | None = None
) -> list[Request]:
    """`count` requests for the messages, or for each of the prompts. Raises Refused, and Unread
    where pictures of the messages are not read yet."""
    # Their fields have the body's own names.
    pictures.check(service, list(pictures.sources_in(call.messages or ())))
    try:
        return _requests(service, call, prompts)
    except Refused as error:
        raise error.renamed(call.names) from None


def _requests(
    service: Service, call: ChatCall, prompts: Iterable[RawPrompt] | None
) -> list[Request]:
    if getattr(call.drawn, "stream_options", None) is not None and not call.drawn.stream:
        raise Refused("stream_options", "only with stream")
    one = _template_of(service, call)
    if one.messages is not None:
        one = replace(one, messages=pictures.messages_read(call.drawn, one.messages))
    each = [one] if prompts is None else (_given(one, prompt) for prompt in prompts)
    requests = [request for prompt in each for request in _replies(service, call, prompt)]
    if call.sized:
        names = len(call.drawn.logprob_token_ids or ())
        scored = 0 if call.scoring is None else call.scoring.top
        alternatives = max(call.alternatives or 0, scored) + names
        check_size(service.model, map(_entries, requests), alternatives, *call.sized)
    return requests


def _given(one: Request, prompt: RawPrompt) -> Request:
    """The request with a prompt that is no conversation."""
    if isinstance(prompt, Prompt):
        return replace(one, ids=prompt.ids, made=prompt)
    return replace(one, ids=prompt)


def _template_of(service: Service, call: ChatCall) -> Request:
    """The request without its prompt's tokens, its length and its seed. Raises Refused."""
    model, drawn, messages, continued = service.model, call.drawn, call.messages, None
    if messages is not None and call.continues:
        messages, continued = continuation(service, messages, call.wanted, call.opened)
    use = tool_use(call.tools, call.tool_choice, model)
    thinking, budget = thinking_of(call.thinking, continued is not None or messages is None)
    fields = request_fields(drawn, model, call.endpoint, use.banned, call.alternatives)
    fields["max_thinking_tokens"] = budget
    begins_with_call = use.opening is not None
    fields |= canvas_fields(drawn, service, fields["sampler"], call.logprobs, begins_with_call)
    fields["prediction"] = call.prediction
    fields |= _ends(use, model, call.is_single, grammar_of(drawn, call.forms), fields)
    if continued is not None:  # the reply may be complete already
        fields["retry_empty"] = drawn.retry_empty is True
    return Request(
        messages=messages,
        continued=continued,
        thinking=thinking,
        tools=use.tools,
        opening=use.opening,
        scoring=call.scoring,
        user=call.user,
        **fields,
        **call.holes,
    )


def _replies(service: Service, call: ChatCall, one: Request) -> list[Request]:
    """The request with its prompt, its length and each of the seeds. Raises Refused."""
    made = service.prompt(one)  # once, however many replies
    if one.made is not None:
        made = replace(made, pictures=one.made.pictures)
    if call.limit == 0 and one.scoring is None:
        one = replace(one, opening=None, grammar=None, pooling=Pooling("last"), max_tokens=0)
    elif one.parts is None:
        assert one.sampler
        canvas = one.sampler.canvas_length
        length = service.limit(call.limit, len(made.ids), canvas, call.is_most)
        one = replace(one, max_tokens=longest(one, length, service))
    return [
        replace(one, id=new_id(), made=made, seed=seed)
        for seed in seeds_of(call.drawn.seed, call.count)
    ]


def _entries(request: Request) -> int:
    """Tokens at most that the answer has log probabilities of."""
    scored = 0 if request.scoring is None or request.made is None else len(request.made.ids)
    return request.max_tokens + scored


_BESIDE = ("stop", "canvas", "prediction")  # fields of a request, which may say what a reply holds


def _ends(
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
    grammar = _call_grammar(use, model, is_single, answer, may_hold)
    canvas = fields.get("canvas")
    stop, is_read = fields["stop"], canvas is not None and canvas.read_only
    if is_single and use.tools and grammar is None and close and not is_read:
        # A call that is cut at its end is complete, and the only one.
        stop = [*(stop or ()), Marker(close)]
    return {"grammar": grammar, "stop": stop}


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


def check_count(messages: Sequence[Any], settings: ServerSettings) -> None:
    """Raises Refused for too many messages."""
    if len(messages) > settings.max_messages:
        raise Refused(
            "messages",
            f"{len(messages)} of them, and this server takes {settings.max_messages}",
            "leave out old ones, or raise --max-messages",
        )


def continuation(
    service: Service, messages: list[Message], wanted: bool | None, opened: bool | None
) -> tuple[list[Message], str | None]:
    """The messages that the prompt shows complete, and the text of the last one where the reply
    continues that message: an assistant's.

    wanted, opened: the body's continue_final_message and add_generation_prompt. Raises Refused.
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
    check_long_texts(messages[-1], lambda text: service.engine.check_length(text, "messages"))
    markers = service.model.template.markers
    text: str = check_messages(messages[-1:], len(messages) - 1, markers)[0]["content"]
    return messages[:-1], text or None


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
    markers = model.template.markers
    return ToolUse(tools, markers.call_open + markers.calls.opening(name), name)


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
    raise Refused(
        "tool_choice",
        'must be none, auto, required, or {"type": "function", "function": {"name": …}}',
    )


def _call_grammar(
    use: ToolUse,
    model: ServedModel,
    is_single: bool,
    answer: GrammarSource | None,
    may_hold: bool,
) -> Source | None:
    """The grammar of a reply that may call tools: where one of them is strict or has to be called,
    or the answer has a grammar of its own. is_single: whether one call is the most; answer: the
    grammar of a reply without calls; may_hold: whether tools that are not strict are held where one
    has to be called. None where calls are free. Raises Refused."""
    tools, required = use.tools, use.opening is not None
    is_strict = any(_is_strict(tool) for tool in tools or ())
    markers, token_id = model.template.markers, model.tokenizer.token_id
    names = (markers.call_open, markers.call_close, markers.quote)
    opens, closes, quote = (token_id(name) if name else None for name in names)
    needed = (opens, closes, quote) if markers.quote else (opens, closes)
    holds_all = required and may_hold and any(map(_names_arguments, tools or ()))
    if (
        not tools
        or opens is None
        or closes is None
        or None in needed
        or not (is_strict or holds_all or answer)
    ):
        return answer
    if answer is not None and answer.kind != "schema":
        raise Refused(answer.field, "goes with no tools", "leave one of them out")
    made = [_tool(tool, number, holds_all) for number, tool in enumerate(tools)]
    return CallSource(
        tuple(tool for tool in made if use.name in (None, tool.name)),
        opens,
        closes,
        quote,
        required,
        is_single,
        None if required else answer,
        style=markers.calls,
    )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _names_arguments(tool: Mapping[str, Any]) -> bool:
    """Whether the schema of a tool's parameters says which there are."""
    parameters = tool["function"].get("parameters")
    return isinstance(parameters, Mapping) and "properties" in parameters


def _tool(tool: Mapping[str, Any], number: int, is_held: bool) -> CallTool:
    """is_held: whether its arguments match its schema though it is not strict. Raises ValueError
    for a strict tool."""
    name, parameters = tool["function"]["name"], tool["function"].get("parameters")
    field = f"tools[{number}].function.parameters"
    if _is_strict(tool):
        return CallTool(name, schema_source(parameters or {}, field).text, field)
    if not is_held or not _names_arguments(tool):
        return CallTool(name, None, field)
    return CallTool(name, json.dumps(parameters, ensure_ascii=False), field, is_strict=False)


MARKER = "<__media__>"
"""Stands in a text for a picture of `multimodal_data`, as in llama-server's API."""

_FORMS = "a text, a list of token ids and texts, or an object with prompt_string"


def prompts_in(value: Any, field: str, most: int) -> list[MixedPrompt]:
    """The prompts of a body's field, at most so many. A list in which there is an id is one prompt.
    Raises Refused."""
    if value == []:
        raise Refused(field, "is empty")
    if not isinstance(value, list) or any(type(item) is int for item in value):
        return [_prompt(value, field)]
    if len(value) > most:
        raise Refused(
            field, f"at most {most:,} prompts, and {len(value):,} are given", "send them in parts"
        )
    return [_prompt(item, f"{field}[{i}]") for i, item in enumerate(value)]


def _prompt(value: Any, where: str) -> MixedPrompt:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text_of(value, where)
    if not isinstance(value, list):
        raise Refused(where, f"must be {_FORMS}")
    for i, item in enumerate(value):
        if type(item) is not int and not isinstance(item, str):
            raise Refused(f"{where}[{i}]", "must be a token id or a text")
    return value


def _text_of(value: Mapping[str, Any], where: str) -> MixedPrompt:
    """The prompt of {"prompt_string": …, "multimodal_data": […]}, or of {"content": [parts]}."""
    for name in value:
        if name not in ("prompt_string", "content", "multimodal_data"):
            raise Refused(f"{where}.{name[:100]}", "unknown", f"a prompt is {_FORMS}")
    text = value.get("prompt_string")
    if isinstance(text, str) and "content" not in value:
        return _with_media(text, value.get("multimodal_data"), f"{where}.multimodal_data")
    content = value.get("content")
    if not isinstance(content, list) or "prompt_string" in value or value.get("multimodal_data"):
        raise Refused(where, f"must be {_FORMS}")
    parts = [_content_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if any(isinstance(part, PictureSource) for part in parts):
        return ["", *parts]  # bos comes before a text
    return "".join(map(str, parts))


def _with_media(text: str, given: Any, where: str) -> MixedPrompt:
    """The text with a picture in the place of each marker."""
    if given is None or given == []:
        return text
    if not isinstance(given, list):
        raise Refused(where, "must be a list of pictures in base64")
    first, *rest = text.split(MARKER, len(given) + 1)
    if len(rest) != len(given):
        count = text.count(MARKER)
        raise Refused(where, f"has {len(given)} pictures, and the prompt {count} times {MARKER}")
    parts: list[int | str | PictureSource] = [first]
    for i, (picture, behind) in enumerate(zip(given, rest, strict=True)):
        parts += [pictures.of_base64(picture, f"{where}[{i}]"), behind]
    return parts


def _content_part(part: Any, where: str) -> str | PictureSource:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        return pictures.of_url(part, where)
    if kind in ("input_audio", "input_video"):
        raise Refused(where, "audio and videos are not supported", "send text")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise Refused(where, 'must be {"type": "text", "text": …}')
    return str(part["text"])


def before(service: Service, call: ChatCall, suffix: str, field: str = "suffix") -> ChatCall:
    """The call with a hole before a suffix in the place of its reply, and a limit that says how
    many tokens the hole has at most. Without a limit it has what the canvas leaves beside the
    suffix, or half of it where the suffix is longer. field: the suffix's name. Raises Refused."""
    given = given_in(call.drawn) | {"suffix": True, "echo": call.scoring}
    if (refused := exclusions.refusal(exclusions.SUFFIX, given)) is not None:
        raise refused.renamed({"suffix": field})
    request = Request(suffix, endpoint=call.endpoint)
    with service.engine.refusals(request):
        tokens = len(service.encode(suffix, field, special=False))
    longest = call.drawn.canvas_length or service.model.config.canvas_length
    room = longest - 1 - min(tokens, longest // 2)  # the token before the hole is on the canvas too
    if room < 1:
        raise Refused(
            "canvas_length",
            f"a canvas of {longest} has no room for text before a suffix",
            "ask for 3 or more",
        )
    most = room if call.limit in (None, -1) else min(call.limit or 1, room)
    return replace(call, holes={"parts": (Hole(at_most=most), suffix), "max_tokens": most})


LONG_PROMPT = "request ({tokens} tokens) exceeds the available context size ({context} tokens)"
LONG_INPUT = "input ({tokens} tokens) is too large for a slot ({context} tokens)"


def check_slot(service: Service, tokens: int, words: str, field: str) -> None:
    """Raises ApiError for a prompt of more tokens than a slot that is made at start."""
    if tokens > service.context:
        text = words.format(tokens=tokens, context=service.context)
        message = f"{text}, try increasing it with --context"
        answer = ApiError.of(TooLarge(None, message, "", tokens, service.context))
        answer.param = field
        raise answer
