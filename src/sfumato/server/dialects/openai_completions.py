"""OpenAI's text completions: text that continues a prompt, without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sfumato.engine import Account, Finished, Request, Settled, new_id
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.given_canvas import canvas_fields, longest, names, reads
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.logprobs import Logged, TokenLog, legacy, log_of, logged
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.sampling import check_size, request_fields, seeds_of
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.errors import bad_request
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import SSE
from sfumato.server.schemas.openai import CompletionBody
from sfumato.server.service import Service

PATH = "/v1/completions"


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The one or several prompts that the field holds. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: is empty", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if isinstance(part, str | list)]


def parse(service: Service, body: CompletionBody) -> list[Request]:
    """n requests for each prompt. Raises ApiError."""
    prompts, count = prompts_of(body.prompt), body.n or 1
    most = service.settings.max_choices
    if len(prompts) * count > most:
        raise bad_request(f"n: at most {most} replies to a request, all prompts together", "n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream", "stream_options")
    fields = request_fields(body, service.model, PATH, alternatives=body.logprobs)
    fields["grammar"] = grammar_of(body)
    fields |= canvas_fields(body, service, fields["sampler"], body.logprobs is not None)
    requests: list[Request] = []
    for prompt in prompts:
        ids = service.raw_prompt(prompt, PATH, body.user)
        if not ids:
            raise bad_request(
                "prompt: is empty, and this model has no token to begin with", "prompt"
            )
        one = Request(ids=ids, user=body.user, **fields)
        length = service.limit(body.max_tokens, len(ids), fields["sampler"].canvas_length)
        one = replace(one, max_tokens=longest(one, length, service))
        made = service.prompt(one)  # one for all n, which then encode it once
        requests += [
            replace(one, id=new_id(), made=made, seed=seed) for seed in seeds_of(body.seed, count)
        ]
    limits = [request.max_tokens for request in requests]
    alternatives = (body.logprobs or 0) + names(body)
    check_size(service.model, limits, alternatives, "n, prompt, max_tokens, logprobs")
    return requests


class TextRenderer(Renderer):
    """Choices with texts, as one body or as chunks."""

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        self._service, self._id = service, requests[0].id
        self._requests, self._by_id = requests, body.return_tokens_as_token_ids
        # A read answers nothing.
        self._embedded = service.model.embedded and not reads(requests[0])
        self._base = openai_objects.head("cmpl", "text_completion", self._id, service.name)
        self._usage = openai_objects.wants_usage(body.stream_options)
        self._per_prompt = body.n or 1
        self._notes = openai_objects.notes(body)
        self._alternatives = body.logprobs
        self.keeps_settled = body.logprobs is not None
        self._logs = [self._log(request) for request in requests]
        # Characters that have come, and that have been sent: some wait for their tokens.
        self._taken, self._sent = [0] * len(requests), [0] * len(requests)

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        ends = [collected.finished for collected in replies]
        texts = (text for end in ends for text in warnings(self._embedded, end.reply))
        accounts = [end.account for end in ends]
        return {
            **openai_objects.head("cmpl", "text_completion", self._id, self._service.name),
            "usage": openai_objects.usage_of_prompts(accounts, self._per_prompt),
            **openai_objects.figures(ends, [*self._notes, *texts]),
            "choices": self._choices(replies),
        }

    def _choices(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, collected in enumerate(replies):
            reply = collected.finished.reply
            choice = {
                "index": number,
                "text": reply.text,
                "logprobs": self._logprobs(number, collected),
                "finish_reason": openai_objects.finish_reason(reply),
            }
            collected.settled.clear()
            if len(replies) > 1:
                choice["timings"] = openai_objects.timings(collected.finished.account)
            yield choice

    def _log(self, request: Request) -> TokenLog | None:
        if self._alternatives is None:
            return None
        return log_of(self._service, self._alternatives, request, self._by_id)

    def _logprobs(self, number: int, collected: CollectedReply) -> dict[str, Any] | None:
        log = self._log(self._requests[number])
        return None if log is None else legacy(logged(log, collected))

    def extra(self, fields: Frame) -> Frame:
        return self._base | {"choices": []} | fields

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        log = self._logs[number]
        if log is not None:
            log.add(settled)
        yield from self._texts(number, settled.text)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._texts(number, end.reply.text[self._taken[number] :])
        if (log := self._logs[number]) is not None:
            yield from self._logged(number, log.end())
        last = self._chunk(number, "", openai_objects.finish_reason(end.reply))
        last["timings"] = openai_objects.timings(end.account)
        if notes := [*self._notes, *warnings(self._embedded, end.reply)]:
            last["warnings"], self._notes = notes, []
        yield last

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        if self._usage:
            yield self.extra({"usage": openai_objects.usage_of_prompts(accounts, self._per_prompt)})

    def _texts(self, number: int, text: str) -> Iterable[Frame]:
        self._taken[number] += len(text)
        log = self._logs[number]
        if log is not None:
            yield from self._logged(number, log.take(text))
            return
        for piece in pieces(text):
            yield self._chunk(number, piece)

    def _logged(self, number: int, parts: Sequence[Logged]) -> Iterable[Frame]:
        """Text with its tokens."""
        for text, tokens in parts:
            chunk = self._chunk(number, text)
            chunk["choices"][0]["logprobs"] = legacy([(text, tokens)], self._sent[number])
            self._sent[number] += len(text)
            yield chunk

    def _chunk(self, number: int, text: str, reason: str | None = None) -> Frame:
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return {**self._base, "choices": [choice], **usage}


OPENAI_COMPLETIONS = Dialect(
    name="text_completions",
    path=PATH,
    tag="OpenAI",
    help="Text that continues a prompt, without a chat template.",
    body_type=CompletionBody,
    parse=parse,
    renderer=TextRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, end="data: [DONE]\n\n"),
)
