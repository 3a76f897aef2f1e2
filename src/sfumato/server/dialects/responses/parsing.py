"""The body of a response becomes the engine's request, and `RequestEcho`: what the response
repeats.

The body loses its lists and longer texts before the reply is written. The echo lives as long as the
reply is written, so its bytes are bounded here: nothing else counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    requests_of,
    thinking_of,
    tool_use,
)
from sfumato.server.dialects.responses.body import ENCRYPTED, LOGPROBS, ResponsesBody
from sfumato.server.dialects.responses.input import (
    Message,
    References,
    conversation,
    items_of,
    latest_turns,
    nested,
    nested_choice,
    shown_choice,
    shown_tools,
)
from sfumato.server.http.request_body import leaves_out
from sfumato.server.response_store import Item, Missing
from sfumato.server.service import Service
from sfumato.text.prompt import prompt_ids

MOST_ECHOED = 2**18  # characters of the tools, and again of the schema
MOST_WAITING = 2**20  # of an input that was cut, and waits for the end of its reply to be kept


@dataclass(frozen=True)
class RequestEcho:
    owner: str
    items: tuple[Item, ...]  # of the body's own input, where the response is kept
    fields: dict[str, Any]  # of the response
    logprobs: bool
    encrypted: bool  # whether thoughts have an encrypted content
    notes: tuple[str, ...]  # for `warnings`


def is_short(values: Iterable[Any], most: int = MOST_ECHOED) -> bool:
    """Whether values of JSON come to at most so many characters."""
    count = 0
    for value in values:
        count += len(json.dumps(value, ensure_ascii=False))
        if count > most:
            return False
    return True


def bounded(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The fields, in which long tools are none and a long schema is an empty one; notes: gets a
    line for each."""
    if not is_short(fields["tools"]):
        fields = fields | {"tools": []}
        notes.append("tools: too long to be repeated in the response")
    text = fields["text"]
    if not is_short([text["format"].get("schema")]):
        fields = fields | {"text": text | {"format": text["format"] | {"schema": {}}}}
        notes.append("text.format.schema: too long to be repeated in the response")
    return fields


PATH = "/v1/responses"
WORDING = {
    "messages": "input",
    "tools[].function": "tools[]",
    "max_tokens": "max_output_tokens",
}
"""What the engine's and chat's checks name, and this body calls otherwise."""

_OBJECT = {"type": "object"}


def parse(service: Service, body: ResponsesBody) -> list[Request]:
    """The one request. Raises Refused."""
    if body.stream_options is not None and not body.stream:
        raise Refused("stream_options", "only with stream")
    before, placed = _items(service, body)
    own = [item for _, item in placed]
    earlier = [("previous_response_id", item) for item in before]
    talk = conversation(body.instructions, [*earlier, *placed])
    call = _call(service, body, talk.messages)
    notes: list[str] = []
    kept = len(talk.messages)
    if body.truncation == "auto" and (over := kept - _fitting(service, call)):
        notes.append(f"input: the oldest {over} messages are left out")
        talk = talk.without(over)
        call = replace(call, messages=talk.messages)
    with talk.named():
        requests = requests_of(service, call)
    body.keep(_echo(service, body, own, len(talk.messages) < kept, notes))
    return requests


def _items(service: Service, body: ResponsesBody) -> tuple[list[Item], list[tuple[str, Item]]]:
    """The items of the responses before, and the body's own with their places. Raises Refused."""
    most, store = service.settings.max_messages, service.responses
    if not isinstance(body.input, str) and len(body.input) > most:
        raise _too_many(len(body.input), most)
    ignored = leaves_out(body, service.settings)
    referred = References(store, body.owner, service.settings.max_body)
    own = items_of(body.input, referred.item, ignored)
    before: list[Item] = []
    try:
        for entry in store.chain(body.owner, body.previous_response_id, most):
            if entry.status == "in_progress":
                raise Refused(
                    "previous_response_id",
                    "that response is still being made",
                    "wait for its end, or cancel it",
                )
            referred.count(len(entry.items) + len(entry.output))
            before += [*entry.inputs, *entry.outputs]
            if len(before) + len(own) > most:
                raise _too_many(len(before) + len(own), most)
    except Missing as missing:
        raise Refused(
            "previous_response_id",
            f"there is no response {str(missing.args[0])[:128]!r} here",
            "it was not kept (store), or was forgotten (--response-store); send the whole "
            "conversation as input",
            code="previous_response_not_found",
        ) from None
    return [item for item in before if item["type"] != "reasoning"], own


def _too_many(count: int, most: int) -> Refused:
    return Refused(
        "input",
        f"{count} items with those of the responses before, and this server takes {most}",
        "leave out old ones, or raise --max-messages",
    )


def _call(service: Service, body: ResponsesBody, messages: list[Message]) -> ChatCall:
    """Raises Refused."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatCall(
        PATH,
        body,
        messages,
        continues=False,
        tools=nested(body.tools, leaves_out(body, service.settings)),
        tool_choice=nested_choice(body.tool_choice),
        is_single=body.parallel_tool_calls is False,
        forms=lambda: _of_text(body),
        thinking=Thinking(effort, most=body.max_thinking_tokens, effort_field="reasoning.effort"),
        alternatives=body.top_logprobs,
        limit=body.max_output_tokens,
        user=body.user,
        sized=("max_tokens", "top_logprobs"),
    )


def _of_text(body: ResponsesBody) -> Iterator[GrammarSource]:
    """What `text.format` asks for. Raises ValueError."""
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return
    schema = given.schema_ if given.type == "json_schema" else None
    yield schema_source(_OBJECT if schema is None else schema, "text.format.schema")


def _fitting(service: Service, call: ChatCall) -> int:
    """How many of the messages fit a slot together with the reply. Raises Refused."""
    model, messages = service.model, call.messages or []
    thinking, _ = thinking_of(call.thinking)
    tools = tool_use(call.tools, call.tool_choice, model).tools
    canvas = call.drawn.canvas_length or model.config.canvas_length
    room = canvas if call.limit is None or call.limit == -1 else call.limit

    def fits(messages: Sequence[Any]) -> bool:
        try:
            ids = prompt_ids(
                model.template,
                model.tokenizer,
                messages,
                thinking=thinking,
                tools=tools,
                check=lambda text: service.engine.check_length(text, "input"),
            )
        except ValueError:  # too long, or wrong, which is said where the prompt is made
            return False
        return len(ids) + room <= service.context

    return len(latest_turns(messages, fits))


def _echo(
    service: Service, body: ResponsesBody, own: list[Item], is_cut: bool, notes: list[str]
) -> RequestEcho:
    """is_cut: whether the prompt lacks a part of the input, which nothing else holds then."""
    is_kept = body.store is not False and service.responses.keeps
    if is_kept and is_cut and not body.stream and not is_short(own, MOST_WAITING):
        is_kept = False
        notes.append("store: the response is not kept: its input is too long, and was cut")
    include = body.include or []
    text = body.text
    shown: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        given = text.format
        of_format = {"name": given.name, "schema": given.schema_, "strict": given.strict}
        shown = {"type": given.type}
        shown |= {name: value for name, value in of_format.items() if value is not None}
    reasoning = body.reasoning
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": is_kept,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": shown_choice(body.tool_choice),
        "tools": shown_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    fields = bounded(fields, notes)
    return RequestEcho(
        body.owner,
        tuple(own) if is_kept else (),
        fields,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        encrypted=ENCRYPTED in include,
        notes=tuple(notes),
    )
