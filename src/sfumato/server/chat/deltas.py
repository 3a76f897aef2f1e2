"""`DeltaRenderer`: replies in parts, each of which is sent once: thought, text, calls, and the end.

What has been sent of a reply is kept here, and so are the tokens of its text with their log
probabilities (`TokenLog`), the progress of its prompt and its warnings. A dialect says what each
part looks like. Knows no dialect.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, ServedModel, Settled
from sfumato.server import examples
from sfumato.server.chat import objects
from sfumato.server.chat.call import ignored_tools, unknown_calls
from sfumato.server.chat.sampling import reads
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Frame, Renderer
from sfumato.server.schemas import Body
from sfumato.server.service import Service, token_text
from sfumato.text.aligned import AlignedTokens
from sfumato.text.reply import ToolCall, region_after

NOT_IN_TOP = -9999.0  # OpenAI's value for a token that is not among the most probable
Entry = dict[str, Any]  # of one token, as OpenAI's API has it
Logged = tuple[str, list[Entry]]  # text, and the tokens that it is made of


class TokenLog(AlignedTokens[Entry]):
    """Matches tokens with the parts of an answer's text as they are sent.

    The `token` of an entry is the text that it completes, so that tokens joined are the answer: of
    the tokens that are the bytes of one character, the last has it.
    """

    def __init__(
        self,
        service: Service,
        alternatives: int,
        named: Sequence[int] = (),
        by_id: bool = False,
    ) -> None:
        """alternatives: most probable tokens at each position; named: tokens that are named there
        too; by_id: tokens are named by their ids, and not by their texts."""
        super().__init__(service.model.tokenizer, service.model.template.markers)
        self._model, self._alternatives = service.model, alternatives
        self._named, self._by_id = tuple(named), by_id

    def follow(self, prompt: Sequence[int]) -> None:
        """The reply is to a prompt of these ids, which may end in a thought. Before any `add`."""
        tokenizer, markers = self._model.tokenizer, self._model.template.markers
        self._region = region_after(prompt, tokenizer, markers)

    def add(self, commit: Settled) -> None:
        """The tokens of a settled canvas."""
        self.push(commit.token_ids, partial(self._entry, commit))

    def completed(self, text: str, items: list[Entry]) -> None:
        if not self._by_id:
            for entry in items:
                entry["token"] = ""
            items[-1]["token"] = text

    def cut(self, text: str, items: list[Entry]) -> None:
        if items and not self._by_id:
            items[-1] |= {"token": text, "bytes": list(text.encode())}

    def _entry(self, commit: Settled, at: int, token: int) -> Entry:
        top: list[tuple[int, float]] = []
        if commit.top_ids is not None and commit.top_probs is not None:
            top = list(zip(commit.top_ids[at].tolist(), commit.top_probs[at].tolist(), strict=True))
        logs = {i: math.log(p) if p > 0 else NOT_IN_TOP for i, p in top}
        if commit.named is not None:
            # Of a token that is named twice, one number: the most probable ones' own.
            own = zip(self._named, commit.named[at].tolist(), strict=True)
            logs = {i: max(log, NOT_IN_TOP) for i, log in own} | logs
        if commit.log_probs is not None:
            logs = {token: commit.log_probs[at].item()} | logs
        shown = [i for i, _ in top[: self._alternatives]]
        shown += [i for i in self._named if i not in shown]
        alternatives = [self._token(i, logs[i]) for i in shown]
        return self._token(token, logs.get(token, NOT_IN_TOP)) | {"top_logprobs": alternatives}

    def _token(self, token: int, log: float) -> Entry:
        shown, raw = text_and_bytes(self._model, token)
        name = f"token_id:{token}" if self._by_id else shown
        return {"token": name, "logprob": log, "bytes": list(raw)}


class ReadLog(TokenLog):
    """The log of a read: every position has an entry, markers and padding too, and the text is
    complete at the end alone."""

    def __init__(self, service: Service, alternatives: int, named: Sequence[int], by_id: bool):
        super().__init__(service, alternatives, named, by_id)
        self._entries: list[Entry] = []

    def add(self, commit: Settled) -> None:
        for at, token in enumerate(commit.token_ids):
            self._entries.append(self._entry(commit, at, token))

    def take(self, text: str) -> list[Logged]:
        self._text += text
        return []

    def end(self) -> list[Logged]:
        return [(self._text, self._entries)]


def logged(log: TokenLog, collected: CollectedReply) -> list[Logged]:
    """All of an answer, in parts with their tokens. log: a fresh one. The canvases are dropped."""
    for commit in collected.settled:
        log.add(commit)
    collected.settled.clear()
    return log.take(collected.finished.reply.text) + log.end()


@lru_cache(maxsize=2**16)
def text_and_bytes(model: ServedModel, token: int) -> tuple[str, bytes]:
    """A token as text, and its bytes."""
    text = token_text(model, token)
    shown = model.tokenizer.decode([token], skip_special=False) if text else ""
    return shown, model.tokenizer.bytes_of(token) or text.encode()


def legacy(parts: Sequence[Logged], offset: int = 0) -> dict[str, Any]:
    """The same in the form of text completions; offset: of the first token, in characters."""
    offsets = []
    for text, tokens in parts:
        offsets += [offset] * len(tokens)
        offset += len(text)
    entries = [entry for _, tokens in parts for entry in tokens]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_named(entry["top_logprobs"]) for entry in entries],
        "text_offset": offsets,
    }


def _named(top: Sequence[Entry] | None) -> dict[str, float] | None:
    """The number of the most probable of the tokens with one text."""
    return None if top is None else {each["token"]: each["logprob"] for each in reversed(top)}


# One word, with the space before it; what is very long, or has no spaces, is cut.
_PIECE = re.compile(r"\s?\S{1,24}|\s{1,24}")


def pieces(text: str) -> list[str]:
    """The text cut between words; joined, the pieces are the text."""
    return _PIECE.findall(text)


WATCH_S = 0.1  # how often the engine's state is looked at


@dataclass
class _Sent:
    """What has been sent of a reply: characters, calls, and how far its prompt is encoded."""

    thought: int = 0
    text: int = 0
    calls: int = 0
    encoded: int | None = None  # tokens of its prompt; None: nothing is reported yet
    reports: bool = False  # whether more of the prompt is to be reported


class DeltaRenderer(Renderer):
    """The replies to one HTTP request, by number. Parts without a frame are left out."""

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        *bodies: Body | None,
        alternatives: int | None = None,
        by_id: bool | None = None,
        progress: bool = False,
    ) -> None:
        """bodies: those whose unknown fields were ignored; alternatives, by_id: as `TokenLog` has
        them, None where no log probabilities are wanted; progress: whether the client asks how far
        its prompts are encoded."""
        self.service, self.requests, self.tools = service, requests, requests[0].tools
        self.notes = [line for body in bodies if body is not None for line in objects.notes(body)]
        self.notes += ignored_tools(self.tools, service.model)
        # Both packaged models know a fixed set of answers. A read answers nothing.
        self._embedded = service.model.packaged is not None and not reads(requests[0])
        self.alternatives, self.by_id = alternatives, by_id
        self.logs = [self.new_log(request) for request in requests]
        for log, request in zip(self.logs, requests, strict=True):
            if log is not None and request.made is not None:
                log.follow(request.made.ids)
        self.keeps_settled = any(each is not None for each in self.logs)
        self._sent = [_Sent(reports=progress) for _ in requests]
        self._numbers = {request.id: number for number, request in enumerate(requests)}

    def new_log(self, request: Request) -> TokenLog | None:
        """The log of the tokens of a reply's text, where one is wanted."""
        if self.alternatives is None:
            return None
        named = request.sampler.named_tokens if request.sampler else ()
        kind = ReadLog if reads(request) else TokenLog
        return kind(self.service, self.alternatives, named, bool(self.by_id))

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        """A piece of a thought."""
        return ()

    @abstractmethod
    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        """A piece of the answer. tokens: that it is made of, where there is a log."""

    def calls(self, number: int, at: int, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        """The calls that a canvas brings. at: how many there were before."""
        for place, call in enumerate(calls, at):
            yield from self.call(number, place, call, pieces(objects.arguments(call)))

    def call(
        self, number: int, at: int, call: ToolCall, arguments: Sequence[str]
    ) -> Iterable[Frame]:
        """A call begins, and its arguments follow: a JSON text in pieces."""
        return ()

    @abstractmethod
    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        """All of the reply is sent."""

    def reported(self, number: int, progress: dict[str, Any]) -> Frame:
        """How far a prompt is encoded."""
        return self.extra({"index": number, "prompt_progress": progress})

    @property
    def watches_s(self) -> float | None:
        return WATCH_S if any(sent.reports for sent in self._sent) else None

    def waiting(self) -> Iterable[Frame]:
        return self._news(range(len(self._sent)))

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield from self._news([number])
        if (log := self.logs[number]) is not None:
            log.add(settled)
        yield from self._grown(number, settled.thought, settled.text)
        yield from self._called(number, settled.tool_calls)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._news([number])
        all_of_it = end.account.prompt_tokens
        yield from self._report(number, end.account, all_of_it, end.account.prefill_s)
        yield from self.rest(number, end.reply)
        yield from self.end(number, end)

    def rest(self, number: int, reply: Reply) -> Iterable[Frame]:
        """What no canvas has brought."""
        sent = self._sent[number]
        thought = (reply.thought or "")[sent.thought :]
        yield from self._grown(number, thought, reply.text[sent.text :])
        if (log := self.logs[number]) is not None:
            for text, tokens in log.end():
                yield from self.text(number, text, tokens)
        yield from self._called(number, reply.tool_calls[sent.calls :])

    def entries(self, number: int, collected: CollectedReply) -> list[Entry] | None:
        """The entries of all tokens of a reply that is no stream; None without a log."""
        if (log := self.used_log(number)) is None:
            return None
        return [entry for _, tokens in logged(log, collected) for entry in tokens]

    def used_log(self, number: int) -> TokenLog | None:
        """The log of a reply that is no stream, which nothing else needs: it may be large."""
        log, self.logs[number] = self.logs[number], None
        return log

    def warnings(self, reply: Reply) -> list[str]:
        """Lines about one reply, beside the notes about its request."""
        return [*examples.warnings(self._embedded, reply), *unknown_calls(self.tools, reply)]

    def warned(self, reply: Reply) -> Frame:
        """The notes and the warnings as a field of an answer, where there are any."""
        lines = [*self.notes, *self.warnings(reply)]
        return {"warnings": lines} if lines else {}

    def verified(self, reply: Reply) -> Frame:
        """The findings of a second reader as a field of an answer, where they were asked for."""
        if reply.verification is None:
            return {}
        return {"verification": objects.verification(self.service, reply.verification)}

    def _news(self, numbers: Sequence[int]) -> Iterator[Frame]:
        """What has been encoded of those prompts since the last time."""
        if any(self._sent[number].reports for number in numbers):
            for row in self.service.engine.state().running:
                number = self._numbers.get(row.request_id)
                if number is not None and number in numbers:
                    yield from self._report(number, row, row.encoded_tokens, row.total_s)

    def _report(self, number: int, of: Account, encoded: int, seconds: float) -> Iterator[Frame]:
        """The first progress of a prompt says what a slot held already, and the last one that all
        is encoded."""
        sent, total, cached = self._sent[number], of.prompt_tokens, of.cached_tokens
        if not sent.reports:
            return
        for count in [cached, encoded] if sent.encoded is None else [encoded]:
            if sent.encoded is None or count > sent.encoded:
                sent.encoded = count
                fields = {"total": total, "cache": cached, "processed": count}
                yield self.reported(number, fields | {"time_ms": 1e3 * seconds})
        sent.reports = sent.encoded is None or sent.encoded < total

    def _grown(self, number: int, thought: str, text: str) -> Iterator[Frame]:
        sent, log = self._sent[number], self.logs[number]
        sent.thought += len(thought)
        sent.text += len(text)
        for piece in pieces(thought):
            yield from self.thought(number, piece)
        parts = [(piece, None) for piece in pieces(text)] if log is None else log.take(text)
        for part, tokens in parts:
            yield from self.text(number, part, tokens)

    def _called(self, number: int, calls: Sequence[ToolCall]) -> Iterator[Frame]:
        if calls:
            yield from self.calls(number, self._sent[number].calls, calls)
            self._sent[number].calls += len(calls)
