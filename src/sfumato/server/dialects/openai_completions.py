"""OpenAI's text completions: text that continues a prompt, without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sfumato.engine import Account, Finished, PromptScoring, Request, Settled, new_id
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.echo import EchoLog, prompt_logprobs, prompt_text
from sfumato.server.dialects.shared.given_canvas import canvas_fields, longest, names, reads
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.insertion import insertion
from sfumato.server.dialects.shared.logprobs import Logged, TokenLog, legacy, log_of, logged
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.sampling import check_size, limited, request_fields, seeds_of
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import SSE
from sfumato.server.schemas.openai import CompletionBody
from sfumato.server.service import Service

PATH = "/v1/completions"


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The one or several prompts that the field holds. Raises Refused."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refused("prompt", "is empty")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if isinstance(part, str | list)]


def parse(service: Service, body: CompletionBody) -> list[Request]:
    """n requests for each prompt. Raises Refused."""
    body = limited(body)
    prompts, count = prompts_of(body.prompt), body.n or 1
    most = service.settings.max_choices
    if len(prompts) * count > most:
        raise Refused("n", f"at most {most} replies to a request, all prompts together")
    if body.stream_options is not None and not body.stream:
        raise Refused("stream_options", "only with stream")
    fields = _fields(service, body)
    inserted = None
    if body.suffix:
        given = {
            "suffix": True,
            "canvas": fields["canvas"],
            "echo": fields["scoring"],
            "mode=causal": fields["sampler"].mode == "causal",
        }
        exclusions.check(exclusions.SUFFIX, given)
        inserted = insertion(service, body, body.suffix, body.max_tokens, "suffix", PATH)
    requests: list[Request] = []
    for prompt in prompts:
        ids = service.raw_prompt(prompt, PATH, body.user)
        if not ids:
            raise Refused("prompt", "is empty, and this model has no token to begin with")
        one = Request(ids=ids, user=body.user, **fields)
        if inserted is None:
            length = service.limit(body.max_tokens, len(ids), fields["sampler"].canvas_length)
            one = replace(one, max_tokens=longest(one, length, service))
        else:
            one = replace(one, **inserted)
        made = service.prompt(one)  # one for all n, which then encode it once
        requests += [
            replace(one, id=new_id(), made=made, seed=seed) for seed in seeds_of(body.seed, count)
        ]
    limits = [_entries(request) for request in requests]
    alternatives = max(body.logprobs or 0, body.prompt_logprobs or 0) + names(body)
    check_size(service.model, limits, alternatives, "n, prompt, max_tokens, logprobs")
    return requests


def _entries(request: Request) -> int:
    """Tokens at most that the answer has log probabilities of."""
    scored = 0 if request.scoring is None or request.made is None else len(request.made.ids)
    return request.max_tokens + scored


def _fields(service: Service, body: CompletionBody) -> dict[str, Any]:
    """What all requests of a body share. Raises Refused."""
    fields = request_fields(body, service.model, PATH, alternatives=body.logprobs)
    fields["grammar"] = grammar_of(body)
    given = {
        "echo": body.echo,
        "grammar": fields["grammar"],
        "mode=canvas": body.mode == "canvas",
        "logprob_token_ids": body.logprob_token_ids,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "stream": body.stream,
    }
    exclusions.check(exclusions.COMPLETION, given)
    if body.echo:
        fields["sampler"] = replace(fields["sampler"], mode="causal")
        try:
            fields["sampler"].check_mode()
        except Refused as error:
            why = "the reply is written in the mode causal, without steps"
            raise Refused("echo", why, error.advice) from None
        fields["retry_empty"] = bool(body.retry_empty)
    fields |= canvas_fields(body, service, fields["sampler"], body.logprobs is not None)
    fields["scoring"] = scoring_of(body)
    if body.max_tokens == 0 and fields["scoring"] is None:
        raise Refused(
            "max_tokens", "0 asks for nothing without echo or prompt_logprobs", "ask for 1 at least"
        )
    return fields


def scoring_of(body: CompletionBody) -> PromptScoring | None:
    """What of the prompt's tokens is wanted. Raises Refused."""
    named = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        return PromptScoring(max(body.logprobs or 0, named or 0), named is not None)
    return None if named is None else PromptScoring(named, ranks=True)


def _prompt_ids(request: Request) -> list[int]:
    assert request.made is not None
    return request.made.ids


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
        self._alternatives, self._prompt_alternatives = body.logprobs, body.prompt_logprobs
        self._echoes = bool(body.echo)
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
                "text": self._prompt(number) + reply.text,
                "logprobs": self._logprobs(number, collected),
                "finish_reason": openai_objects.finish_reason(reply),
            }
            if self._prompt_alternatives is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._service.model, collected.finished.scores, self._prompt_alternatives
                )
            collected.settled.clear()
            if len(replies) > 1:
                choice["timings"] = openai_objects.timings(collected.finished.account)
            yield choice

    def _log(self, request: Request) -> TokenLog | None:
        if self._alternatives is None:
            return None
        if self._echoes:
            ids = _prompt_ids(request)
            return EchoLog(self._service, self._alternatives, ids, bool(self._by_id))
        return log_of(self._service, self._alternatives, request, self._by_id)

    def _logprobs(self, number: int, collected: CollectedReply) -> dict[str, Any] | None:
        log = self._log(self._requests[number])
        if isinstance(log, EchoLog):
            for commit in collected.settled:
                log.add(commit)
            return legacy(log.parts(collected.finished.scores))
        return None if log is None else legacy(logged(log, collected))

    def _prompt(self, number: int) -> str:
        """The text that a reply's begins with."""
        if not self._echoes:
            return ""
        return prompt_text(self._service.model, _prompt_ids(self._requests[number]))

    def extra(self, fields: Frame) -> Frame:
        return self._base | {"choices": []} | fields

    def begin(self, number: int) -> Iterable[Frame]:
        if self._logs[number] is None and (text := self._prompt(number)):
            yield self._chunk(number, text)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        log = self._logs[number]
        if log is not None:
            log.add(settled)
        if not isinstance(log, EchoLog):
            yield from self._texts(number, settled.text)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        if isinstance(log := self._logs[number], EchoLog):
            chunk = self._chunk(number, self._prompt(number) + end.reply.text)
            chunk["choices"][0]["logprobs"] = legacy(log.parts(end.scores))
            yield chunk
        else:
            yield from self._rest(number, end)
        last = self._chunk(number, "", openai_objects.finish_reason(end.reply))
        last["timings"] = openai_objects.timings(end.account)
        if notes := [*self._notes, *warnings(self._embedded, end.reply)]:
            last["warnings"], self._notes = notes, []
        yield last

    def _rest(self, number: int, end: Finished) -> Iterable[Frame]:
        """What no frame has yet of a text that was sent canvas by canvas."""
        yield from self._texts(number, end.reply.text[self._taken[number] :])
        if (log := self._logs[number]) is not None:
            yield from self._logged(number, log.end())

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        if self._usage:
            usage = openai_objects.usage_of_prompts(accounts, self._per_prompt)
            yield self.extra(openai_objects.closing(usage, accounts))

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
