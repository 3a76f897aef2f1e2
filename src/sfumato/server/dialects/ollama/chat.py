"""Ollama's routes that generate: POST /api/chat and POST /api/generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sfumato.api import Reply
from sfumato.diffusion.constraints.grammar_source import GrammarSource, schema_source
from sfumato.engine import Account, Finished, Request, Settled
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    Thinking,
    ToolUse,
    continuation,
    ignored_tools,
    reply_ends,
    thinking_of,
    tool_use,
    unknown_calls,
)
from sfumato.server.chat.deltas import Unsent, pieces
from sfumato.server.chat.grammars import grammar_of
from sfumato.server.chat.logprobs import Logged, log_of, logged
from sfumato.server.chat.prompts import insertion
from sfumato.server.chat.sampling import request_fields, seeds_of
from sfumato.server.dialects.ollama.forms import (
    LEVELS,
    OLLAMA_ERRORS,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGeneration,
    OllamaOptions,
    nanoseconds,
    now,
)
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.errors import Wording
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.request_body import check_fields, leaves_out
from sfumato.server.http.wire import Wire, line
from sfumato.server.schemas.body import Unknown
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.reply import ToolCall

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


# JSON may begin with a space, and clients would read an empty line as a broken object.
WIRE = Wire("application/x-ndjson", line, keepalive=" ")


class OllamaRenderer(Renderer):
    """Text and thought in pieces, each in an object of its own; the last one says done."""

    def __init__(
        self, service: Service, body: OllamaGeneration, requests: Sequence[Request]
    ) -> None:
        (request,) = requests
        self._service, self._request = service, request
        options = () if body.options is None else objects.notes(body.options)
        self._notes = [*objects.notes(body), *options]
        self._notes += ignored_tools(request.tools, service.model)
        self.keeps_settled = bool(body.logprobs)
        self._alternatives = body.top_logprobs or 0
        self._unsent = Unsent()
        self._log = self._new_log()
        self._calls = 0  # that were sent

    def content(self, text: str, thought: str, calls: Sequence[ToolCall] = ()) -> Frame:
        """What a part of a reply stands in."""
        message: Frame = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [
                _call(call, number) for number, call in enumerate(calls, self._calls)
            ]
        return {"message": message}

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        end, log = collected.finished, self._new_log()
        reply = end.reply
        logs: Frame = {}
        if log is not None:
            logs = {"logprobs": [entry for _, tokens in logged(log, collected) for entry in tokens]}
        shown = self.content(reply.text, reply.thought or "", reply.tool_calls)
        return self._part(shown | self._end(end) | logs)

    def extra(self, fields: Frame) -> Frame:
        return self._part(self.content("", "") | {"done": False} | fields)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        if self._log is not None:
            self._log.add(settled)
        yield from self._parts(*self._unsent.of(settled))

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        thought, text, calls = self._unsent.rest(end.reply)
        yield from self._parts(thought, text, ())
        if self._log is not None:
            yield from self._logged(self._log.end())
        yield from self._parts("", "", calls)
        yield self._part(self.content("", "") | self._end(end))

    def _new_log(self) -> Any:
        if not self.keeps_settled:
            return None
        return log_of(self._service, self._alternatives, self._request, by_id=False)

    def _parts(self, thought: str, text: str, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        for piece in pieces(thought):
            yield self.extra(self.content("", piece))
        if self._log is not None:
            yield from self._logged(self._log.take(text))
        else:
            for piece in pieces(text):
                yield self.extra(self.content(piece, ""))
        if calls:
            yield self.extra(self.content("", "", calls))
            self._calls += len(calls)

    def _logged(self, parts: Sequence[Logged]) -> Iterable[Frame]:
        for text, tokens in parts:
            yield self.extra(self.content(text, "") | {"logprobs": tokens})

    def _part(self, fields: Frame) -> Frame:
        return {"model": self._service.name, "created_at": now(), **fields}

    def _end(self, end: Finished) -> Frame:
        reply = end.reply
        lines = [*self._notes, *self._warnings(reply)]
        reason = "length" if reply.stop_reason == "max_tokens" else "stop"
        durations = durations_of(end.account)
        done = {"done": True, "done_reason": reason} | durations
        return done | ({"warnings": lines} if lines else {})

    def _warnings(self, reply: Reply) -> list[str]:
        embedded = self._service.model.embedded
        return [*warnings(embedded, reply), *unknown_calls(self._request.tools, reply)]


class GenerateRenderer(OllamaRenderer):
    """The same as a completion."""

    def content(self, text: str, thought: str, calls: Sequence[ToolCall] = ()) -> Frame:
        return {"response": text} | ({"thinking": thought} if thought else {})


def durations_of(account: Account) -> Frame:
    """Tokens, and times in nanoseconds; nothing is loaded for a request."""
    return {
        "total_duration": nanoseconds(account.total_s),
        "load_duration": 0,
        "prompt_eval_count": account.prompt_tokens,
        "prompt_eval_duration": nanoseconds(account.prefill_s),
        "eval_count": account.output_tokens,
        "eval_duration": nanoseconds(account.denoise_s + account.commit_s),
    }


def _call(call: ToolCall, index: int) -> Frame:
    return {
        "id": objects.new_id("call"),
        "function": {"index": index, "name": call.name, "arguments": dict(call.arguments)},
    }


_WORDING: Wording = {
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
    "max_tokens": "options.num_predict",
}


def _loaded(service: Service, body: OllamaGeneration, content: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a client that only wants the model loaded, or unloaded: the model stays."""
    unloads = body.keep_alive in (0, "0", "0s")
    reason = "unload" if unloads else "load"
    end = {"done": True, "done_reason": reason}
    return {"model": service.name, "created_at": now(), **content, **end}


def _without_messages(service: Service, body: OllamaChatBody) -> dict[str, Any] | None:
    if body.messages:
        return None
    # The other fields are checked as those of any message.
    parse_chat(service, body.model_copy(update={"messages": [{"role": "user", "content": ""}]}))
    return _loaded(service, body, {"message": {"role": "assistant", "content": ""}})


def _without_prompt(service: Service, body: OllamaGenerateBody) -> dict[str, Any] | None:
    if body.prompt or body.suffix or body.system:
        return None
    parse_generate(service, body.model_copy(update={"prompt": " "}))  # checks the other fields
    return _loaded(service, body, {"response": ""})


OLLAMA_CHAT = Dialect(
    name="ollama_chat",
    path=CHAT_PATH,
    tag="Ollama",
    help="The reply to a conversation, as lines of JSON or, without a stream, as one body.",
    body_type=OllamaChatBody,
    parse=parse_chat,
    renderer=OllamaRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording=_WORDING,
    at_once=_without_messages,
)

OLLAMA_GENERATE = Dialect(
    name="ollama_generate",
    path=GENERATE_PATH,
    tag="Ollama",
    help="The reply to a prompt, or the text between a prompt and a suffix.",
    body_type=OllamaGenerateBody,
    parse=parse_generate,
    renderer=GenerateRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording={"messages": "prompt", **_WORDING},
    at_once=_without_prompt,
)
