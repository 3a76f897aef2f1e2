"""OpenAI's chat completions: a body becomes requests, and replies become choices or chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, Settled, new_id
from sfumato.refused import Refused
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.ends import reply_ends
from sfumato.server.dialects.shared.given_canvas import canvas_fields, longest, names, reads
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.logprobs import Logged, TokenLog, log_of, logged
from sfumato.server.dialects.shared.openai_messages import continuation, conversation
from sfumato.server.dialects.shared.openai_tools import (
    ignored_tools,
    tool_use,
    unknown_calls,
)
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.prediction import prediction_of
from sfumato.server.dialects.shared.prompt_progress import Progress, PromptProgress
from sfumato.server.dialects.shared.sampling import check_size, limited, request_fields, seeds_of
from sfumato.server.dialects.shared.thinking import Thinking, thinking_of
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import SSE
from sfumato.server.schemas.openai import ChatBody
from sfumato.server.service import Service
from sfumato.text.reply import ToolCall

PATH = "/v1/chat/completions"


def parse(service: Service, body: ChatBody) -> list[Request]:
    """One request for each of the n replies. Raises Refused."""
    body = limited(body)
    markers = service.model.template.markers
    messages, continued = continuation(
        conversation(body, service.settings),
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
        self._notes = [*openai_objects.notes(body), *ignored_tools(self._tools, service.model)]
        self._usage = openai_objects.wants_usage(body.stream_options)
        self._base = openai_objects.head(
            "chatcmpl", "chat.completion.chunk", self._id, service.name
        )
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
            **openai_objects.head("chatcmpl", "chat.completion", self._id, self._service.name),
            "usage": openai_objects.usage([end.account for end in ends]),
            **openai_objects.figures(ends, notes),
            "choices": self._choices(replies),
        }

    def _choices(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, collected in enumerate(replies):
            end = collected.finished
            choice = {
                "index": number,
                "message": message(end.reply),
                "logprobs": self._logprobs(number, collected),
                "finish_reason": openai_objects.finish_reason(end.reply, end.reply.tool_calls),
            }
            collected.settled.clear()
            if len(replies) > 1:
                choice["timings"] = openai_objects.timings(end.account)
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
        last = self._chunk(number, {}, openai_objects.finish_reason(reply, reply.tool_calls))
        last["timings"] = openai_objects.timings(end.account)
        if notes := [*self._notes, *self._warnings(reply)]:
            last["warnings"], self._notes = notes, []
        yield last

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        if self._usage:
            usage = openai_objects.usage(accounts)
            yield self.extra(openai_objects.closing(usage, accounts))

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
        begun = openai_objects.call_object(call)
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
    calls = [openai_objects.call_object(call) for call in reply.tool_calls]
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
