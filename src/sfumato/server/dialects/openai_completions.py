"""OpenAI's text completions: text that continues a prompt, without a chat template.

An answer may have the prompt in it: its text, and the log probabilities of its tokens, in OpenAI's
form (`echo` with `logprobs`), in which each token of prompt and reply has an entry, end tokens too;
and in vLLM's (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.engine import (
    Account,
    Finished,
    PromptScores,
    PromptScoring,
    Request,
    ServedModel,
    Settled,
    new_id,
)
from sfumato.options import exclusions
from sfumato.options.limits import MOST_TOKENS
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.deltas import pieces
from sfumato.server.chat.grammars import grammar_of
from sfumato.server.chat.logprobs import Entry, Logged, TokenLog, legacy, log_of, logged
from sfumato.server.chat.prompts import insertion
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
from sfumato.server.http.wire import SSE
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import First, Ids, Texts
from sfumato.server.schemas.generation import (
    Generation,
)
from sfumato.server.schemas.json_schemas import within
from sfumato.server.service import Service, token_text
from sfumato.text.tokenizer import Detokenizer


class CompletionBody(Generation):
    prompt: Annotated[
        str | Texts | Ids | Annotated[list[Ids], First], WithJsonSchema(json_schemas.PROMPTS)
    ]
    logprobs: Annotated[int | None, within("top_tokens")] = Field(None, description="Alternatives.")
    max_tokens: Annotated[
        int | None,
        Field(ge=-1, le=MOST_TOKENS),
        WithJsonSchema(json_schemas.MAX_TOKENS_OR_NONE),
    ] = Field(None, description="-1: what fits; 0: none, with echo or prompt_logprobs.")
    echo: bool | None = Field(
        None,
        description="Begin the text with the prompt, and with logprobs score its tokens; the reply "
        "is written in the mode causal.",
    )
    prompt_logprobs: Annotated[int | None, within("top_tokens")] = Field(
        None, description="Score the prompt's tokens, and name so many alternatives; not streamed."
    )
    suffix: str | None = Field(
        None, description="What comes after the text, which is as long as fits between the two."
    )


def prompt_text(model: ServedModel, ids: Sequence[int]) -> str:
    """The text of a prompt's tokens, without the token that every text begins with."""
    return model.tokenizer.decode(ids[_begins(model, ids) :], skip_special=False)


def _begins(model: ServedModel, ids: Sequence[int]) -> int:
    """1 where the first token is the one that every text begins with."""
    return int(bool(ids) and ids[0] == model.tokenizer.bos_id)


class EchoLog(TokenLog):
    """Of a prompt and the reply to it: an entry for each token, in their order, once all are
    known."""

    def __init__(self, service: Service, alternatives: int, prompt: Sequence[int], by_id: bool):
        super().__init__(service, alternatives, (), by_id)
        self._prompt = prompt
        self._written: list[tuple[int, Entry]] = []

    def add(self, commit: Settled) -> None:
        ids = [*commit.token_ids, *([] if commit.end_id is None else [commit.end_id])]
        self._written += [(token, self._entry(commit, at, token)) for at, token in enumerate(ids)]

    def take(self, text: str) -> list[Logged]:
        """Nothing: the tokens come together, in `parts`."""
        return []

    def parts(self, scores: PromptScores | None) -> list[Logged]:
        """A part for each token, with the text that it completes; without scores (of a prompt that
        was not encoded to its end) the prompt's tokens have no numbers."""
        entries = [*zip(self._prompt, self._prompt_entries(scores), strict=True), *self._written]
        texts, begins = Detokenizer(self._model.tokenizer), _begins(self._model, self._prompt)
        return [
            ("" if place < begins else texts.push([token]), [entry])
            for place, (token, entry) in enumerate(entries)
        ]

    def _prompt_entries(self, scores: PromptScores | None) -> list[Entry]:
        known = None if scores is None else scores.scores
        if known is None:
            return [self._unknown(token) for token in self._prompt]
        entries = [self._unknown(token) for token in self._prompt[:1]]
        columns = known.log_probs, known.top_ids, known.top_log_probs
        rows = zip(self._prompt[1:], *(column.tolist() for column in columns), strict=True)
        for token, log, top_ids, top_logs in rows:
            top = zip(top_ids[: self._alternatives], top_logs, strict=False)
            alternatives = [self._token(i, own) for i, own in top]
            entries.append(self._token(token, log) | {"top_logprobs": alternatives})
        return entries

    def _unknown(self, token: int) -> Entry:
        return self._token(token, 0.0) | {"logprob": None, "top_logprobs": None}


def prompt_logprobs(
    model: ServedModel, scores: PromptScores | None, top: int
) -> list[dict[str, Any] | None] | None:
    """vLLM's list: null for the first token, and of each other token its own entry and those of the
    `top` most probable ones, by id; null where the prompt was not encoded to its end."""
    if scores is None:
        return None
    listed: list[dict[str, Any] | None] = [None]
    known = scores.scores
    if known is None:
        return listed
    columns = known.log_probs, known.ranks, known.top_ids, known.top_log_probs
    rows = zip(scores.ids[1:], *(column.tolist() for column in columns), strict=True)
    for token, log, rank, top_ids, top_logs in rows:
        entries = {str(token): _entry(model, token, log, rank)}
        for place, (i, own) in enumerate(zip(top_ids[:top], top_logs, strict=False), 1):
            entries.setdefault(str(i), _entry(model, i, own, place))
        listed.append(entries)
    return listed


def _entry(model: ServedModel, token: int, log: float, rank: int) -> dict[str, Any]:
    return {"logprob": log, "rank": rank, "decoded_token": token_text(model, token)}


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
        self._base = objects.head("cmpl", "text_completion", self._id, service.name)
        self._usage = objects.wants_usage(body.stream_options)
        self._per_prompt = body.n or 1
        self._notes = objects.notes(body)
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
            **objects.head("cmpl", "text_completion", self._id, self._service.name),
            "usage": objects.usage_of_prompts(accounts, self._per_prompt),
            **objects.figures(ends, [*self._notes, *texts]),
            "choices": self._choices(replies),
        }

    def _choices(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, collected in enumerate(replies):
            reply = collected.finished.reply
            choice = {
                "index": number,
                "text": self._prompt(number) + reply.text,
                "logprobs": self._logprobs(number, collected),
                "finish_reason": objects.finish_reason(reply),
            }
            if self._prompt_alternatives is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._service.model, collected.finished.scores, self._prompt_alternatives
                )
            collected.settled.clear()
            if len(replies) > 1:
                choice["timings"] = objects.timings(collected.finished.account)
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
        last = self._chunk(number, "", objects.finish_reason(end.reply))
        last["timings"] = objects.timings(end.account)
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
            usage = objects.usage_of_prompts(accounts, self._per_prompt)
            yield self.extra(objects.closing(usage, accounts))

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
