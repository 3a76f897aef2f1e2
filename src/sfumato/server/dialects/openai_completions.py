"""OpenAI's text completions: text that continues a prompt, without a chat template.

An answer may have the prompt in it: its text, and the log probabilities of its tokens, in OpenAI's
form (`echo` with `logprobs`), in which each token of prompt and reply has an entry, end tokens too;
and in vLLM's (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from sfumato.api import Reply
from sfumato.engine import (
    Finished,
    PromptScores,
    PromptScoring,
    Request,
    ServedModel,
    Settled,
)
from sfumato.options import exclusions
from sfumato.options.limits import MOST_TOKENS
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    before,
    prompts_in,
    requests_of,
)
from sfumato.server.chat.deltas import Entry, Logged, TokenLog, legacy, logged
from sfumato.server.chat.pictures import prompts_read
from sfumato.server.chat.sampling import (
    given_in,
    limited,
    sampler_of,
)
from sfumato.server.dialects.openai_chat import ChoicesRenderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import SSE, Dialect, Frame
from sfumato.server.schemas import (
    First,
    Generation,
    Ids,
    Texts,
    within,
)
from sfumato.server.service import Service, token_text
from sfumato.text.tokenizer import Detokenizer


class CompletionBody(Generation):
    prompt: Annotated[
        str | Texts | Ids | Annotated[list[Ids], First], WithJsonSchema(schemas.PROMPTS)
    ]
    logprobs: Annotated[int | None, within("top_tokens")] = Field(None, description="Alternatives.")
    max_tokens: Annotated[
        int | None,
        Field(ge=-1, le=MOST_TOKENS),
        WithJsonSchema(schemas.MAX_TOKENS_OR_NONE),
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


def _begins(model: ServedModel, ids: Sequence[int]) -> int:
    """1 where the first token is the one that every text begins with."""
    return int(bool(ids) and ids[0] == model.tokenizer.bos_id)


class EchoLog(TokenLog):
    """The log of a prompt and the reply to it: an entry for each token, in their order, once all
    are known."""

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

    def end(self) -> list[Logged]:
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


def parse(service: Service, body: CompletionBody) -> list[Request]:
    """n requests for each prompt. Raises Refused."""
    body = limited(body)
    count, most = body.n or 1, service.settings.max_choices
    prompts = prompts_read(service, body, prompts_in(body.prompt, "prompt", most))
    if len(prompts) * count > most:
        raise Refused("n", f"at most {most} replies to a request, all prompts together")
    _check(service, body)
    scoring = scoring_of(body)
    if body.max_tokens == 0 and scoring is None:
        raise Refused(
            "max_tokens", "0 asks for nothing without echo or prompt_logprobs", "ask for 1 at least"
        )
    call = ChatCall(
        PATH,
        body.model_copy(update={"mode": "causal"}) if body.echo else body,
        thinking=Thinking(most=body.max_thinking_tokens),
        logprobs=body.logprobs is not None,
        alternatives=body.logprobs,
        scoring=scoring,
        limit=body.max_tokens,
        count=count,
        user=body.user,
        sized=("n", "prompt", "max_tokens", "logprobs"),
    )
    if body.suffix:
        call = before(service, call, body.suffix)
    return requests_of(
        service, call, (service.raw_prompt(prompt, PATH, body.user) for prompt in prompts)
    )


def _check(service: Service, body: CompletionBody) -> None:
    """Raises Refused for fields that do not go together."""
    exclusions.check(exclusions.COMPLETION, given_in(body))
    if body.echo:
        try:
            replace(sampler_of(body, service.model), mode="causal").check_mode()
        except Refused as error:
            why = "the reply is written in the mode causal, without steps"
            raise Refused("echo", why, error.advice) from None


def scoring_of(body: CompletionBody) -> PromptScoring | None:
    """What of the prompt's tokens is wanted. Raises Refused."""
    named = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        return PromptScoring(max(body.logprobs or 0, named or 0), named is not None)
    return None if named is None else PromptScoring(named, ranks=True)


def _prompt_ids(request: Request) -> list[int]:
    assert request.made is not None
    return request.made.ids


class TextRenderer(ChoicesRenderer):
    """Choices with texts, as one body or as chunks."""

    ids, kind, kind_of_chunks = "cmpl", "text_completion", "text_completion"
    empty: ClassVar[Frame] = {"text": ""}

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        self._echoes, self._prompt_alternatives = bool(body.echo), body.prompt_logprobs
        # Characters that have been sent: some that have come wait for their tokens.
        self._offsets = [0] * len(requests)
        super().__init__(service, body, requests, body.logprobs)

    def new_log(self, request: Request) -> TokenLog | None:
        if self.alternatives is None or not self._echoes:
            return super().new_log(request)
        return EchoLog(self.service, self.alternatives, _prompt_ids(request), bool(self.by_id))

    def shown(self, number: int, reply: Reply) -> Frame:
        return {"text": self._prompt(number) + reply.text}

    def logprobs(self, number: int, collected: CollectedReply) -> Frame | None:
        log = self.used_log(number)
        if isinstance(log, EchoLog):
            logged(log, collected)
            return legacy(log.parts(collected.finished.scores))
        return None if log is None else legacy(logged(log, collected))

    def reason(self, reply: Reply) -> str:
        return objects.finish_reason(reply)

    def more(self, number: int, end: Finished) -> Frame:
        top = self._prompt_alternatives
        if top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.service.model, end.scores, top)}

    def _prompt(self, number: int) -> str:
        """The text that a reply's begins with."""
        if not self._echoes:
            return ""
        model, ids = self.service.model, _prompt_ids(self.requests[number])
        return model.tokenizer.decode(ids[_begins(model, ids) :], skip_special=False)

    def begin(self, number: int) -> Iterable[Frame]:
        if self.logs[number] is None and (text := self._prompt(number)):
            yield self.chunk(number, {"text": text})

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        logprobs = None if tokens is None else legacy([(piece, tokens)], self._offsets[number])
        self._offsets[number] += len(piece)
        yield self.chunk(number, {"text": piece}, logprobs=logprobs)

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        if isinstance(log := self.logs[number], EchoLog):
            fields = {"text": self._prompt(number) + end.reply.text}
            yield self.chunk(number, fields, logprobs=legacy(log.parts(end.scores)))
        yield from super().end(number, end)


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
