"""OpenAI's chat completions: a body becomes requests, and replies become choices or chunks.

The text side checks messages of every API; the checks here are of OpenAI's alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.api import Reply
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Account, Finished, Request, Settled, new_id
from sfumato.options.limits import STRENGTH
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    Thinking,
    continuation,
    ignored_tools,
    reply_ends,
    thinking_of,
    tool_use,
    unknown_calls,
)
from sfumato.server.chat.deltas import Progress, PromptProgress, pieces
from sfumato.server.chat.grammars import grammar_of
from sfumato.server.chat.logprobs import Logged, TokenLog, log_of, logged
from sfumato.server.chat.sampling import (
    canvas_fields,
    check_size,
    limited,
    longest,
    names,
    reads,
    request_fields,
    seeds_of,
)
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.request_body import check_fields, leaves_out
from sfumato.server.http.wire import SSE
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, Ignored, Objects, Only, Unknown
from sfumato.server.schemas.generation import (
    AddPrompt,
    Continue,
    Generation,
    MaxTokens,
    Messages,
    TemplateKwargs,
    Tools,
)
from sfumato.server.schemas.json_schemas import within
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.reply import ToolCall

NoFunctions = Only([], "none", "auto", why="is long deprecated; use tools and tool_choice")


class Prediction(Body):
    """What the canvases of a reply begin as."""

    type: Annotated[Any, Only("content", why='must be "content"')] = None
    content: Annotated[str | Objects, WithJsonSchema(json_schemas.TEXTS)] = Field(
        description="A text, or text parts."
    )
    strength: float | None = Field(
        None, ge=0, le=1, description="Share of the positions that begins as noise."
    )


class ChatBody(Generation):
    messages: Messages = Field(min_length=1)
    add_generation_prompt: AddPrompt = None
    continue_final_message: Continue = None
    max_completion_tokens: MaxTokens = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    tools: Tools = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, WithJsonSchema(json_schemas.TOOL_CHOICE)
    ] = Field(
        None,
        description='none, auto, required, or {"type": "function", "function": {"name": …}}.',
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning_effort: Annotated[str | None, WithJsonSchema(json_schemas.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    audio: Annotated[Any, Only(why="audio is not supported")] = None
    modalities: Annotated[Any, Only(["text"], why="only text is supported")] = None
    functions: Annotated[Any, NoFunctions] = None
    function_call: Annotated[Any, NoFunctions] = None
    store: Annotated[Any, Only(False, why="nothing is stored here")] = None
    web_search_options: Annotated[Any, Only(why="there is no web search here")] = None
    moderation: Annotated[Any, Only(why="there is no moderation here")] = None
    verbosity: Annotated[
        Any, Only("medium", why="cannot be set; say in a message how long the answer should be")
    ] = None
    metadata: Ignored = None
    prediction: Prediction | None = Field(
        None, description="A text that the reply is expected to resemble."
    )
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None


_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        *("role", "content", "name", "tool_calls", "refusal", "annotations", "audio"),
        *("function_call", "reasoning_content", "reasoning"),
    },
    "tool": {"role", "content", "name", "tool_call_id"},
}
UNSUPPORTED = {
    "image_url": "images are not supported yet",
    "input_image": "images are not supported yet",
    "input_audio": "audio is not supported",
    "file": "files are not supported",
    "input_file": "files are not supported",
    "video_url": "videos are not supported",
}


def conversation(
    messages: Sequence[Mapping[str, Any]], settings: ServerSettings, ignored: Unknown | None
) -> list[dict[str, Any]]:
    """The messages in the four roles of the chat template. ignored: records what a lenient server
    leaves out; None where unknown fields are refused. Raises Refused."""
    most = settings.max_messages
    if len(messages) > most:
        raise Refused(
            "messages",
            f"{len(messages)} of them, and this server takes {most}",
            "leave out old ones, or raise --max-messages",
        )
    return [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, ignored: Unknown | None) -> dict[str, Any]:
    """ignored: None where unknown fields are refused."""
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role == "function":
        raise Refused(f"{where}.role", "function is deprecated", "use tool")
    keys = _KEYS.get(role) if isinstance(role, str) else None
    if keys is None:
        raise Refused(f"{where}.role", "must be one of system, developer, user, assistant, tool")
    check_fields(message, keys, where, ignored)
    for key in ("audio", "function_call"):
        if message.get(key) is not None and key in keys:
            raise Refused(f"{where}.{key}", "is not supported")
    clean = {key: value for key, value in message.items() if key in keys} | {"role": role}
    if not isinstance(clean.get("refusal"), str | None):
        raise Refused(f"{where}.refusal", "must be text")
    if role == "assistant" and clean.get("content") is None and not clean.get("tool_calls"):
        clean["content"] = clean.get("refusal") or ""
    if isinstance(clean.get("content"), list):
        clean["content"] = _parts(clean["content"], f"{where}.content")
    return clean


def _parts(parts: Sequence[Any], where: str) -> list[Any]:
    checked = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        here = f"{where}[{i}]"
        if isinstance(kind, str) and kind in UNSUPPORTED:
            raise Refused(here, UNSUPPORTED[kind], code="unsupported")
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        checked.append(part)
    return checked


def prediction_of(given: Prediction) -> PredictedText:
    """Raises Refused."""
    texts = [given.content] if isinstance(given.content, str) else []
    for place, part in enumerate(given.content if isinstance(given.content, list) else ()):
        where = f"prediction.content[{place}]"
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(where, 'must be {"type": "text", "text": …}')
        texts.append(part["text"])
    strength = STRENGTH if given.strength is None else given.strength
    return PredictedText("".join(texts), strength)


PATH = "/v1/chat/completions"


def parse(service: Service, body: ChatBody) -> list[Request]:
    """One request for each of the n replies. Raises Refused."""
    body = limited(body)
    markers = service.model.template.markers
    messages, continued = continuation(
        conversation(body.messages, service.settings, leaves_out(body, service.settings)),
        body.continue_final_message,
        body.add_generation_prompt,
        service.engine.check_length,
        markers,
    )
    use = tool_use(body.tools, body.tool_choice, service.model)
    _check(body, service.settings.max_choices)
    thinking, budget = thinking_of(_thinking(body), continued is not None)
    fields = request_fields(body, service.model, PATH, use.banned, body.top_logprobs)
    fields["max_thinking_tokens"] = budget
    fields |= canvas_fields(body, service, fields["sampler"], bool(body.logprobs))
    if use.opening is not None and fields["canvas"] is not None:
        raise Refused(
            "tool_choice", "a given canvas cannot begin with a call", "leave one of them out"
        )
    if body.prediction is not None:
        fields["prediction"] = prediction_of(body.prediction)
    is_single = body.parallel_tool_calls is False
    fields |= reply_ends(use, service.model, is_single, grammar_of(body), fields)
    if continued is not None:  # the reply may be complete already
        fields["retry_empty"] = body.retry_empty is True
    one = Request(
        messages=messages,
        continued=continued,
        thinking=thinking,
        tools=use.tools,
        opening=use.opening,
        user=body.user,
        **fields,
    )
    prompt = service.prompt(one)  # once, however many replies
    length = longest(one, limit_of(service, body, len(prompt.ids), one), service)
    count = body.n or 1
    alternatives = (body.top_logprobs or 0) + names(body)
    check_size(service.model, [length] * count, alternatives, "n, max_tokens, top_logprobs")
    return [
        replace(one, id=new_id(), made=prompt, max_tokens=length, seed=seed)
        for seed in seeds_of(body.seed, count)
    ]


def _thinking(body: ChatBody) -> Thinking:
    kwargs = body.chat_template_kwargs
    enabled = None if kwargs is None else kwargs.enable_thinking
    return Thinking(body.reasoning_effort, enabled, body.max_thinking_tokens)


def limit_of(service: Service, body: ChatBody, prompt: int, request: Request) -> int:
    """Tokens of a reply to a prompt of so many."""
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    assert request.sampler
    return service.limit(given, prompt, request.sampler.canvas_length)


def _check(body: ChatBody, max_choices: int) -> None:
    if (body.n or 1) > max_choices:
        raise Refused("n", f"at most {max_choices} replies")
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs", "needs logprobs to be true")
    if body.stream_options is not None and not body.stream:
        raise Refused("stream_options", "only with stream")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise Refused(("max_tokens", "max_completion_tokens"), "differ", "send one")


class ChatRenderer(Renderer):
    """Choices with messages, and chunks with deltas."""

    def __init__(self, service: Service, body: ChatBody, requests: Sequence[Request]) -> None:
        self._service, self._id = service, requests[0].id
        self._tools = requests[0].tools
        self._notes = [*objects.notes(body), *ignored_tools(self._tools, service.model)]
        self._usage = objects.wants_usage(body.stream_options)
        self._base = objects.head("chatcmpl", "chat.completion.chunk", self._id, service.name)
        self.keeps_settled = bool(body.logprobs)
        self._alternatives = body.top_logprobs or 0
        self._requests, self._by_id = requests, body.return_tokens_as_token_ids
        # A read answers nothing.
        self._embedded = service.model.embedded and not reads(requests[0])
        self._logs = [self._log(request) for request in requests]
        self._progress = PromptProgress(service, requests, bool(body.return_progress))
        # Characters of the answer and of the thought, and tool calls, that have been sent.
        self._sent = [{"content": 0, "reasoning_content": 0, "calls": 0} for _ in requests]

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        ends = [collected.finished for collected in replies]
        notes = [*self._notes, *(text for end in ends for text in self._warnings(end.reply))]
        return {
            **objects.head("chatcmpl", "chat.completion", self._id, self._service.name),
            "usage": objects.usage([end.account for end in ends]),
            **objects.figures(ends, notes),
            "choices": self._choices(replies),
        }

    def _choices(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, collected in enumerate(replies):
            end = collected.finished
            choice = {
                "index": number,
                "message": message(end.reply),
                "logprobs": self._logprobs(number, collected),
                "finish_reason": objects.finish_reason(end.reply, end.reply.tool_calls),
            }
            collected.settled.clear()
            if len(replies) > 1:
                choice["timings"] = objects.timings(end.account)
            yield choice

    def _log(self, request: Request) -> TokenLog | None:
        if not self.keeps_settled:
            return None
        return log_of(self._service, self._alternatives, request, self._by_id)

    def _logprobs(self, number: int, collected: CollectedReply) -> dict[str, Any] | None:
        log = self._log(self._requests[number])
        if log is None:
            return None
        content = [entry for _, tokens in logged(log, collected) for entry in tokens]
        return {"content": content, "refusal": None}

    def _warnings(self, reply: Reply) -> list[str]:
        calls = unknown_calls(self._tools, reply)
        return [*warnings(self._embedded, reply), *calls]

    def extra(self, fields: Frame) -> Frame:
        return self._base | {"choices": []} | fields

    def begin(self, number: int) -> Iterable[Frame]:
        yield self._chunk(number, {"role": "assistant", "content": ""})

    @property
    def watches_s(self) -> float | None:
        return self._progress.watches_s

    def waiting(self) -> Iterable[Frame]:
        return self._reports(self._progress.news())

    def _reports(self, news: Iterable[Progress]) -> Iterable[Frame]:
        for number, progress in news:
            yield self.extra({"index": number, "prompt_progress": progress})

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield from self._reports(self._progress.rest(number))
        log = self._logs[number]
        if log is not None:
            log.add(settled)
        yield from self._texts(number, "reasoning_content", settled.thought)
        yield from self._texts(number, "content", settled.text)
        for call in settled.tool_calls:
            yield from self._call(number, call)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._reports(self._progress.rest(number, end.account))
        reply, sent = end.reply, self._sent[number]
        thought = (reply.thought or "")[sent["reasoning_content"] :]
        yield from self._texts(number, "reasoning_content", thought)
        yield from self._texts(number, "content", reply.text[sent["content"] :])
        if (log := self._logs[number]) is not None:
            yield from self._logged(number, log.end())
        for call in reply.tool_calls[sent["calls"] :]:
            yield from self._call(number, call)
        last = self._chunk(number, {}, objects.finish_reason(reply, reply.tool_calls))
        last["timings"] = objects.timings(end.account)
        if notes := [*self._notes, *self._warnings(reply)]:
            last["warnings"], self._notes = notes, []
        yield last

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        if self._usage:
            usage = objects.usage(accounts)
            yield self.extra(objects.closing(usage, accounts))

    def _texts(self, number: int, name: str, text: str) -> Iterable[Frame]:
        self._sent[number][name] += len(text)
        log = self._logs[number] if name == "content" else None
        if log is not None:
            yield from self._logged(number, log.take(text))
            return
        for piece in pieces(text):
            yield self._chunk(number, {name: piece})

    def _logged(self, number: int, parts: Sequence[Logged]) -> Iterable[Frame]:
        """Content with its tokens."""
        for text, tokens in parts:
            chunk = self._chunk(number, {"content": text})
            chunk["choices"][0]["logprobs"] = {"content": tokens, "refusal": None}
            yield chunk

    def _call(self, number: int, call: ToolCall) -> Iterable[Frame]:
        begun = objects.call_object(call)
        at, arguments = self._sent[number]["calls"], begun["function"]["arguments"]
        self._sent[number]["calls"] += 1
        begun["function"]["arguments"] = ""
        yield self._chunk(number, {"tool_calls": [{"index": at, **begun}]})
        for piece in pieces(arguments):
            part = {"index": at, "function": {"arguments": piece}}
            yield self._chunk(number, {"tool_calls": [part]})

    def _chunk(self, number: int, delta: dict[str, Any], reason: str | None = None) -> Frame:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return {**self._base, "choices": [choice], **usage}


def message(reply: Reply) -> dict[str, Any]:
    """The assistant's message; content is null where there are only tool calls."""
    calls = [objects.call_object(call) for call in reply.tool_calls]
    thought = {} if reply.thought is None else {"reasoning_content": reply.thought}
    return {
        "role": "assistant",
        "content": None if calls and not reply.text else reply.text,
        "refusal": None,
        **thought,
        **({"tool_calls": calls} if calls else {}),
    }


OPENAI_CHAT = Dialect(
    name="chat_completions",
    path=PATH,
    tag="OpenAI",
    help="The reply to a conversation, as one body or as a stream of chunks.",
    body_type=ChatBody,
    parse=parse,
    renderer=ChatRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, end="data: [DONE]\n\n"),
)
