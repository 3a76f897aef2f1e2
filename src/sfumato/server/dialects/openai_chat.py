"""POST /v1/chat/completions: a body becomes requests, and replies become choices or chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, Settled, new_id
from sfumato.server import examples
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.logprobs import Logged, TokenLog, entries
from sfumato.server.dialects.shared.openai_messages import (
    CALL,
    CALL_END,
    continuation,
    conversation,
    tool_use,
)
from sfumato.server.dialects.shared.sampling import check_size, request_fields, seeds_of
from sfumato.server.http import answer, inflight, request_body, stream
from sfumato.server.http.errors import bad_request
from sfumato.server.http.inflight import Outcome
from sfumato.server.schemas.json_schemas import EFFORTS
from sfumato.server.schemas.openai import ChatBody
from sfumato.server.service import Service
from sfumato.text.reply import ToolCall
from sfumato.text.tokenizer import Marker


async def complete(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, ChatBody) as body:
        requests = await run_in_threadpool(requests_of, service, body)
    # Tools that the prompt holds are no larger than a context.
    body = request_body.light(body, *(("tools",) if requests[0].tools else ()))
    started = await inflight.start(service.engine, requests)
    if body.stream:
        return stream.response(service, started, ChatWriter(service, body, requests))
    found = await inflight.outcomes(http, started, commits=body.logprobs is True)
    return await run_in_threadpool(
        response_body, service, body, found, inflight.headers_of(started)
    )


def requests_of(service: Service, body: ChatBody) -> list[Request]:
    """One request for each of the n replies. Raises ApiError."""
    settings = service.settings
    messages, continued = continuation(
        conversation(body, settings),
        body.continue_final_message,
        body.add_generation_prompt,
        service.engine.check_length,
    )
    use = tool_use(body.tools, body.tool_choice)
    _check(body, settings.max_choices)
    thinking, budget = _thinking(body)
    if thinking and continued is not None:
        name = "chat_template_kwargs" if body.reasoning_effort is None else "reasoning_effort"
        raise bad_request(
            f"{name}: an answer that is continued is not thought about first; ask for no thinking, "
            "or set continue_final_message to false",
            name,
        )
    opener = service.model.tokenizer.token_id(CALL)
    if use.opening and opener is None:
        raise bad_request("tool_choice: this model's vocabulary has no tool calls", "tool_choice")
    banned = [opener] if use.forbidden and opener is not None else []
    alike = request_fields(body, service.model, "/v1/chat/completions", banned, body.top_logprobs)
    if body.parallel_tool_calls is False and use.tools:
        # A call that is cut here is response_body, and the only one.
        alike["stop"] = [*(alike["stop"] or ()), Marker(CALL_END)]
    alike["max_thinking_tokens"] = budget
    if continued is not None:  # which may be whole already
        alike["retry_empty"] = body.retry_empty is True
    one = Request(
        messages=messages,
        continued=continued,
        thinking=thinking,
        tools=use.tools,
        opening=use.opening,
        user=body.user,
        **alike,
    )
    prompt = service.prompt(one)  # once, however many replies
    most = limit_of(service, body, len(prompt.ids))
    count = body.n or 1
    check_size(service.model, [most] * count, body.top_logprobs, "n, max_tokens, top_logprobs")
    return [
        replace(one, id=new_id(), made=prompt, max_tokens=most, seed=seed)
        for seed in seeds_of(body.seed, count)
    ]


def limit_of(service: Service, body: ChatBody, prompt: int) -> int:
    """Tokens of a reply to a prompt of so many."""
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return service.limit(given, prompt, body.canvas_length)


def _check(body: ChatBody, most: int) -> None:
    if (body.n or 1) > most:
        raise bad_request(f"n: at most {most} replies", "n")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream", "stream_options")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens, max_completion_tokens: differ; send one", "max_tokens")


def _thinking(body: ChatBody) -> tuple[bool, int | None]:
    """Whether the model thinks, and for how many tokens at most."""
    effort = body.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort: must be one of {', '.join(EFFORTS)}", "reasoning_effort"
        )
    budget = None if effort is None else EFFORTS[effort]
    asked = body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking
    thinking = asked if asked is not None else effort is not None and budget != 0
    if body.max_thinking_tokens is not None:
        budget = body.max_thinking_tokens
    return bool(thinking), budget if thinking and budget != 0 else body.max_thinking_tokens


def response_body(
    service: Service, body: ChatBody, found: Sequence[Outcome], headers: Mapping[str, str]
) -> Response:
    """In a thread."""
    ends = [outcome.finished for outcome in found]
    name = ends[0].account.request_id
    said = (text for end in ends for text in warnings(service, body, end.reply))
    fields = {
        **openai_objects.head("chatcmpl", "chat.completion", name, service.name),
        "usage": openai_objects.usage([end.account for end in ends]),
    } | openai_objects.figures(ends, [*openai_objects.notes(body), *said])
    return answer.response(fields, _choices(service, body, found), headers)


def _choices(
    service: Service, body: ChatBody, found: Sequence[Outcome]
) -> Iterator[dict[str, Any]]:
    for number, outcome in enumerate(found):
        end = outcome.finished
        choice = {
            "index": number,
            "message": message(end.reply),
            "logprobs": _logprobs(service, body, outcome) if body.logprobs else None,
            "finish_reason": openai_objects.finish_reason(end.reply, end.reply.tool_calls),
        }
        outcome.commits.clear()
        if len(found) > 1:
            choice["timings"] = openai_objects.timings(end.account)
        yield choice


def message(reply: Reply) -> dict[str, Any]:
    """The assistant's message; content is null where there are only tool calls."""
    calls = [openai_objects.call_object(call) for call in reply.tool_calls]
    found: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not reply.text else reply.text,
        "refusal": None,
    }
    if reply.thought is not None:
        found["reasoning_content"] = reply.thought
    if calls:
        found["tool_calls"] = calls
    return found


def warnings(service: Service, body: ChatBody, reply: Reply) -> list[str]:
    """Those of the reply, and of calls for which there is no tool: names are the model's to write,
    but for that of a tool that has to be called."""
    names = {tool["function"]["name"] for tool in body.tools or ()}
    strange = [call.name for call in reply.tool_calls if names and call.name not in names]
    calls = (f"the call of {name!r} is of none of the tools" for name in strange)
    return [*examples.warnings(service.model, reply), *calls]


def _logprobs(service: Service, body: ChatBody, outcome: Outcome) -> dict[str, Any]:
    return {"content": entries(service, body.top_logprobs or 0, outcome), "refusal": None}


class ChatWriter:
    """Chunks of a streamed chat completion."""

    def __init__(self, service: Service, body: ChatBody, requests: Sequence[Request]) -> None:
        name = requests[0].id
        self._base = openai_objects.head("chatcmpl", "chat.completion.chunk", name, service.name)
        self._service, self._body, self._notes = service, body, openai_objects.notes(body)
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        count, few = len(requests), body.top_logprobs or 0
        self._logs = [TokenLog(service, few) if body.logprobs else None for _ in range(count)]
        # Characters of the answer and of the thought, and tool calls, that have gone out.
        self._sent = [{"content": 0, "reasoning_content": 0, "calls": 0} for _ in range(count)]

    def extra(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self._base | {"choices": []} | fields

    def begin(self, number: int) -> Iterable[dict[str, Any]]:
        yield self._chunk(number, {"role": "assistant", "content": ""})

    def commit(self, number: int, commit: Settled) -> Iterable[dict[str, Any]]:
        log = self._logs[number]
        if log is not None:
            log.add(commit)
        yield from self._texts(number, "reasoning_content", commit.thought)
        yield from self._texts(number, "content", commit.text)
        for call in commit.tool_calls:
            yield from self._call(number, call)

    def finish(self, number: int, end: Finished) -> Iterable[dict[str, Any]]:
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
        if found := [*self._notes, *warnings(self._service, self._body, reply)]:
            last["warnings"], self._notes = found, []
        yield last

    def close(self, accounts: Sequence[Account]) -> Iterable[dict[str, Any]]:
        if self._usage:
            yield self.extra({"usage": openai_objects.usage(accounts)})

    def _texts(self, number: int, name: str, text: str) -> Iterable[dict[str, Any]]:
        self._sent[number][name] += len(text)
        log = self._logs[number] if name == "content" else None
        if log is not None:
            yield from self._logged(number, log.take(text))
            return
        for piece in stream.pieces(text):
            yield self._chunk(number, {name: piece})

    def _logged(self, number: int, parts: Sequence[Logged]) -> Iterable[dict[str, Any]]:
        """Content with its tokens."""
        for text, tokens in parts:
            chunk = self._chunk(number, {"content": text})
            chunk["choices"][0]["logprobs"] = {"content": tokens, "refusal": None}
            yield chunk

    def _call(self, number: int, call: ToolCall) -> Iterable[dict[str, Any]]:
        whole = openai_objects.call_object(call)
        at, arguments = self._sent[number]["calls"], whole["function"]["arguments"]
        self._sent[number]["calls"] += 1
        whole["function"]["arguments"] = ""
        yield self._chunk(number, {"tool_calls": [{"index": at, **whole}]})
        for piece in stream.pieces(arguments):
            part = {"index": at, "function": {"arguments": piece}}
            yield self._chunk(number, {"tool_calls": [part]})

    def _chunk(
        self, number: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk
