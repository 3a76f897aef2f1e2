"""Anthropic's messages: POST /v1/messages becomes a request; and a prompt's tokens are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sfumato.diffusion.constraints.grammar_source import GrammarSource, schema_source
from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server.dialects.anthropic.conversation import conversation
from sfumato.server.dialects.anthropic.errors import ANTHROPIC_ERRORS
from sfumato.server.dialects.anthropic.renderer import WIRE, MessagesRenderer
from sfumato.server.dialects.anthropic.tools import WORDING, choice_of, tools_of
from sfumato.server.dialects.shared.encoded_only import encoded_only
from sfumato.server.dialects.shared.ends import reply_ends
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.openai_messages import continuation
from sfumato.server.dialects.shared.openai_tools import tool_use
from sfumato.server.dialects.shared.sampling import request_fields, seeds_of, stops_of
from sfumato.server.dialects.shared.thinking import Thinking, thinking_of
from sfumato.server.dialects.shared.unknown_fields import leaves_out
from sfumato.server.http.dialect import Dialect
from sfumato.server.schemas.anthropic import CountBody, MessagesBody
from sfumato.server.service import Service

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


def parse(service: Service, body: MessagesBody) -> list[Request]:
    """Raises Refused."""
    model = service.model
    ignored = leaves_out(body, service.settings)
    talk = conversation(body, service.settings, ignored)
    tools = tools_of(body.tools, ignored)
    choice, is_single = body.tool_choice, False
    if choice is not None:
        is_single = bool(choice.disable_parallel_tool_use)
    use = tool_use(tools, choice_of(choice), model)
    with talk.named():
        messages, continued = continuation(
            talk.messages, None, None, service.engine.check_length, model.template.markers
        )
        thinking, budget = _thinking(body, continued is not None)
        fields = request_fields(body, model, PATH, use.banned)
        fields |= {"max_thinking_tokens": budget, "stop": _stops(body)}
        fields |= reply_ends(
            use, model, is_single, grammar_of(body, lambda: _formats(body)), fields
        )
        if continued is not None:  # the reply may be complete already
            fields["retry_empty"] = body.retry_empty is True
        one = Request(
            messages=messages,
            continued=continued,
            thinking=thinking,
            tools=use.tools,
            opening=use.opening,
            user=body.metadata.user_id if body.metadata else None,
            **fields,
        )
        prompt = service.prompt(one)
    one = replace(one, made=prompt, seed=seeds_of(body.seed, 1)[0])
    if body.max_tokens == 0:
        return [encoded_only(one)]
    most = service.at_most(body.max_tokens, len(prompt.ids), body.canvas_length)
    return [replace(one, max_tokens=most)]


def _thinking(body: MessagesBody, continued: bool) -> tuple[bool, int | None]:
    """Raises Refused."""
    config = body.thinking
    kind = "disabled" if config is None else config.type
    budget = None
    if config is not None and kind == "enabled":
        budget = config.budget_tokens
        if budget is None:
            raise Refused("thinking.budget_tokens", "is missing", code="missing")
        if 0 < body.max_tokens <= budget:
            raise Refused("thinking.budget_tokens", "must be less than max_tokens")
    effort = body.output_config.effort if body.output_config and kind == "adaptive" else None
    most = budget if body.max_thinking_tokens is None else body.max_thinking_tokens
    enabled = kind in ("enabled", "adaptive")
    given = Thinking(effort, enabled, most, "thinking", "thinking")
    return thinking_of(given, continued)


def _stops(body: MessagesBody) -> list[str] | None:
    """Raises Refused."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return stops_of([*given, *(body.stop_sequences or ())]) or None


def _formats(body: MessagesBody) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if body.output_config is not None and body.output_config.format is not None:
        yield schema_source(body.output_config.format.schema_, "output_config.format.schema")
    if body.output_format is not None:
        yield schema_source(body.output_format.schema_, "output_format.schema")


def count(service: Service, body: CountBody) -> dict[str, Any]:
    """The answer of the other route. Raises Refused."""
    fields = {name: value for name, value in body if name in MessagesBody.model_fields}
    # Of a prompt alone, no limit is looked at.
    counted = MessagesBody.model_construct(**fields | {"max_tokens": 0})
    (request,) = parse(service, counted)
    assert request.made
    return {"input_tokens": len(request.made.ids)}


MESSAGES = Dialect(
    name="messages",
    path=PATH,
    tag="Anthropic",
    help="The reply to a conversation, as one message or as a stream of events.",
    body_type=MessagesBody,
    parse=parse,
    renderer=MessagesRenderer,
    streams=lambda body: bool(body.stream),
    wire=WIRE,
    errors=ANTHROPIC_ERRORS,
    wording={**WORDING, "stop": "stop_sequences"},
)
