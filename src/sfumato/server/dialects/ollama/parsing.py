"""Ollama's chat and generate bodies as requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sfumato.diffusion.constraints.grammar_source import GrammarSource, schema_source
from sfumato.engine import Request
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.dialects.ollama.conversation import conversation
from sfumato.server.dialects.shared.ends import reply_ends
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.insertion import insertion
from sfumato.server.dialects.shared.openai_messages import continuation
from sfumato.server.dialects.shared.openai_tools import ToolUse, tool_use
from sfumato.server.dialects.shared.sampling import request_fields, seeds_of
from sfumato.server.dialects.shared.thinking import Thinking, thinking_of
from sfumato.server.dialects.shared.unknown_fields import leaves_out
from sfumato.server.schemas.ollama import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGeneration,
    OllamaOptions,
)
from sfumato.server.schemas.ollama_schemas import LEVELS
from sfumato.server.service import Service

CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"


def parse_chat(service: Service, body: OllamaChatBody) -> list[Request]:
    """Raises Refused."""
    messages, continued = continuation(
        conversation(body.messages or (), service.settings, leaves_out(body, service.settings)),
        None,
        None,
        service.engine.check_length,
        service.model.template.markers,
    )
    use = tool_use(body.tools, None, service.model)
    fields = _fields(service, body, CHAT_PATH, use, continued is not None)
    if continued is not None:  # the reply may be complete already
        fields["retry_empty"] = options_of(body).retry_empty is True
    one = Request(messages=messages, continued=continued, tools=use.tools, **fields)
    return [_limited(service, body, one)]


def parse_generate(service: Service, body: OllamaGenerateBody) -> list[Request]:
    """Raises Refused."""
    if body.context:
        raise Refused(
            "context", "is not supported", "send the conversation as messages to /api/chat"
        )
    prompt, suffix = body.prompt or "", body.suffix or ""
    if not (suffix or body.raw):
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": prompt}]
        fields = _fields(service, body, GENERATE_PATH, ToolUse(None), continued=False)
        return [_limited(service, body, Request(messages=messages, **fields))]
    given = {name: getattr(body, name) for name in ("system", "raw", "suffix")}
    exclusions.check(exclusions.OLLAMA, given)
    ids = service.raw_prompt(prompt, GENERATE_PATH, special=bool(body.raw))
    if not ids:
        raise Refused("prompt", "is empty, and this model has no token to begin with")
    fields = _fields(service, body, GENERATE_PATH, ToolUse(None), continued=True)
    if not suffix:
        return [_limited(service, body, Request(ids=ids, **fields))]
    given = {"suffix": True, "format": body.format, "logprobs": body.logprobs}
    exclusions.check(exclusions.OLLAMA, given)
    del fields["grammar"]
    options = options_of(body)
    fields |= insertion(service, options, suffix, _given(options), "suffix", GENERATE_PATH)
    return [Request(ids=ids, seed=seeds_of(options.seed, 1)[0], **fields)]


def options_of(body: OllamaGeneration) -> OllamaOptions:
    return body.options or OllamaOptions.model_validate({})


def streams(body: OllamaGeneration) -> bool:
    """Whether the reply is streamed: by default it is."""
    return body.stream is not False


def _given(options: OllamaOptions) -> int | None:
    """Tokens at most; None: what fits."""
    given = options.num_predict
    return None if given is None or given < 1 else given


def _limited(service: Service, body: OllamaGeneration, one: Request) -> Request:
    """The request with its prompt, its limit and a seed. Raises Refused."""
    options = options_of(body)
    given = _given(options)
    prompt = service.prompt(one)
    if given is None:
        limit = service.default_limit(len(prompt.ids), options.canvas_length)
    else:
        limit = service.at_most(given, len(prompt.ids), options.canvas_length)
    return replace(one, made=prompt, max_tokens=limit, seed=seeds_of(options.seed, 1)[0])


def _fields(
    service: Service, body: OllamaGeneration, endpoint: str, use: ToolUse, continued: bool
) -> dict[str, Any]:
    """The fields of a Request that both routes read in the same way. continued: whether the reply
    begins without a thought. Raises Refused."""
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs", "needs logprobs to be true")
    options = options_of(body)
    fields = request_fields(options, service.model, endpoint, use.banned, body.top_logprobs)
    thinking, budget = thinking_of(_thinking(body, options), continued)
    fields |= {
        "since": body.since,
        "drafts": streams(body) and bool(body.stream_drafts),
        "thinking": thinking,
        "max_thinking_tokens": budget,
    }
    answer = grammar_of(options, lambda: _format(body.format))
    return fields | reply_ends(use, service.model, False, answer, fields)


def _thinking(body: OllamaGeneration, options: OllamaOptions) -> Thinking:
    """Raises Refused."""
    think = body.think
    if isinstance(think, str) and think in LEVELS:
        return Thinking(think, None, options.max_thinking_tokens, "think", "think")
    if not isinstance(think, bool | None):
        raise Refused("think", f"must be true, false or one of {', '.join(LEVELS)}")
    return Thinking(None, bool(think), options.max_thinking_tokens, "think", "think")


def _format(given: Any) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if given is None or given == "":
        return
    if given == "json":
        given = {"type": "object"}
    if not isinstance(given, dict):
        raise Refused("format", 'must be "json" or a JSON schema object')
    yield schema_source(given, "format")
