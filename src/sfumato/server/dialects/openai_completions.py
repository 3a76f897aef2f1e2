"""POST /v1/completions: text that goes on from a prompt, without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from sfumato.engine import Account, Finished, Request, Settled, new_id
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.logprobs import Logged, TokenLog, entries, legacy
from sfumato.server.dialects.shared.sampling import check_size, request_fields, seeds_of
from sfumato.server.examples import warnings
from sfumato.server.http import answer, inflight, request_body, stream
from sfumato.server.http.errors import bad_request
from sfumato.server.http.inflight import Outcome
from sfumato.server.schemas.openai import CompletionBody
from sfumato.server.service import Service


async def complete(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, CompletionBody) as body:
        requests = await run_in_threadpool(requests_of, service, body)
    body = request_body.light(body)
    started = await inflight.start(service.engine, requests)
    if body.stream:
        return stream.response(service, started, TextWriter(service, body, requests))
    found = await inflight.outcomes(http, started, commits=body.logprobs is not None)
    return await run_in_threadpool(
        response_body, service, body, found, inflight.headers_of(started)
    )


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The one or several prompts that the field holds. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: is empty", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if isinstance(part, str | list)]


def requests_of(service: Service, body: CompletionBody) -> list[Request]:
    """n requests for each prompt. Raises ApiError."""
    prompts, count = prompts_of(body.prompt), body.n or 1
    if len(prompts) * count > service.settings.max_choices:
        most = service.settings.max_choices
        raise bad_request(f"n: at most {most} replies to a request, all prompts together", "n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream", "stream_options")
    alike = request_fields(body, service.model, "/v1/completions", alternatives=body.logprobs)
    requests: list[Request] = []
    for prompt in prompts:
        ids = service.raw_prompt(prompt, "/v1/completions", body.user)
        if not ids:
            raise bad_request(
                "prompt: is empty, and this model has no token to begin with", "prompt"
            )
        most = service.limit(body.max_tokens, len(ids), body.canvas_length)
        one = Request(ids=ids, max_tokens=most, user=body.user, **alike)
        made = service.prompt(one)  # one for all n, which then encode it once
        requests += [
            replace(one, id=new_id(), made=made, seed=seed) for seed in seeds_of(body.seed, count)
        ]
    limits = [request.max_tokens for request in requests]
    check_size(service.model, limits, body.logprobs, "n, prompt, max_tokens, logprobs")
    return requests


def response_body(
    service: Service, body: CompletionBody, found: Sequence[Outcome], headers: Mapping[str, str]
) -> Response:
    """In a thread."""
    ends = [outcome.finished for outcome in found]
    name = ends[0].account.request_id
    said = (text for end in ends for text in warnings(service.model, end.reply))
    fields = {
        **openai_objects.head("cmpl", "text_completion", name, service.name),
        "usage": openai_objects.usage_of_prompts([end.account for end in ends], body.n or 1),
    } | openai_objects.figures(ends, [*openai_objects.notes(body), *said])
    return answer.response(fields, _choices(service, body, found), headers)


def _choices(
    service: Service, body: CompletionBody, found: Sequence[Outcome]
) -> Iterator[dict[str, Any]]:
    for number, outcome in enumerate(found):
        reply = outcome.finished.reply
        choice = {
            "index": number,
            "text": reply.text,
            "logprobs": _logprobs(service, body, outcome),
            "finish_reason": openai_objects.finish_reason(reply),
        }
        outcome.commits.clear()
        if len(found) > 1:
            choice["timings"] = openai_objects.timings(outcome.finished.account)
        yield choice


def _logprobs(service: Service, body: CompletionBody, outcome: Outcome) -> dict[str, Any] | None:
    return None if body.logprobs is None else legacy(entries(service, body.logprobs, outcome))


class TextWriter:
    """Chunks of a streamed text completion."""

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        self._base = openai_objects.head("cmpl", "text_completion", requests[0].id, service.name)
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._each = body.n or 1
        self._model, self._notes = service.model, openai_objects.notes(body)
        few = body.logprobs
        self._logs = [None if few is None else TokenLog(service, few) for _ in requests]
        # Characters that were taken, and that have gone out: some wait for their tokens.
        self._taken, self._sent = [0] * len(requests), [0] * len(requests)

    def extra(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self._base | {"choices": []} | fields

    def begin(self, number: int) -> Iterable[dict[str, Any]]:
        return ()

    def commit(self, number: int, commit: Settled) -> Iterable[dict[str, Any]]:
        log = self._logs[number]
        if log is not None:
            log.add(commit)
        yield from self._texts(number, commit.text)

    def finish(self, number: int, end: Finished) -> Iterable[dict[str, Any]]:
        yield from self._texts(number, end.reply.text[self._taken[number] :])
        if (log := self._logs[number]) is not None:
            yield from self._logged(number, log.end())
        last = self._chunk(number, "", openai_objects.finish_reason(end.reply))
        last["timings"] = openai_objects.timings(end.account)
        if found := [*self._notes, *warnings(self._model, end.reply)]:
            last["warnings"], self._notes = found, []
        yield last

    def close(self, accounts: Sequence[Account]) -> Iterable[dict[str, Any]]:
        if self._usage:
            yield self.extra({"usage": openai_objects.usage_of_prompts(accounts, self._each)})

    def _texts(self, number: int, text: str) -> Iterable[dict[str, Any]]:
        self._taken[number] += len(text)
        log = self._logs[number]
        if log is not None:
            yield from self._logged(number, log.take(text))
            return
        for piece in stream.pieces(text):
            yield self._chunk(number, piece)

    def _logged(self, number: int, parts: Sequence[Logged]) -> Iterable[dict[str, Any]]:
        """Text with its tokens."""
        for text, tokens in parts:
            chunk = self._chunk(number, text)
            chunk["choices"][0]["logprobs"] = legacy(tokens, self._sent[number])
            self._sent[number] += len(text)
            yield chunk

    def _chunk(self, number: int, text: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk
