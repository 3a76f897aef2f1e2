"""`DeltaRenderer`: replies in parts, each of which is sent once: thought, text, calls, and the end.

What has been sent of a reply is kept here, and so are the tokens of its text, the progress of its
prompt and its warnings. A dialect says what each part looks like. Knows no dialect.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, Settled
from sfumato.engine.stats import RowState
from sfumato.server import examples
from sfumato.server.chat import objects
from sfumato.server.chat.call import ignored_tools, unknown_calls
from sfumato.server.chat.logprobs import Entry, TokenLog, log_of, logged
from sfumato.server.chat.sampling import reads
from sfumato.server.http.dialect import Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.body import Body
from sfumato.server.service import Service
from sfumato.text.calls import ToolCall

# One word, with the space before it; what is very long, or has no spaces, is cut.
_PIECE = re.compile(r"\s?\S{1,24}|\s{1,24}")


def pieces(text: str) -> list[str]:
    """The text cut between words; joined, the pieces are the text."""
    return _PIECE.findall(text)


@dataclass
class _Sent:
    """What has been sent of a reply: characters, and calls."""

    thought: int = 0
    text: int = 0
    calls: int = 0


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
        # A read answers nothing.
        self._embedded = service.model.embedded and not reads(requests[0])
        self.alternatives, self.by_id = alternatives, by_id
        self.logs = [self.new_log(request) for request in requests]
        self.keeps_settled = any(each is not None for each in self.logs)
        self._sent = [_Sent() for _ in requests]
        self._progress = PromptProgress(service, requests, progress)

    def new_log(self, request: Request) -> TokenLog | None:
        """The log of the tokens of a reply's text, where one is wanted."""
        if self.alternatives is None:
            return None
        return log_of(self.service, self.alternatives, request, self.by_id)

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
        return self._progress.watches_s

    def waiting(self) -> Iterable[Frame]:
        return self._reports(self._progress.news())

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield from self._reports(self._progress.rest(number))
        if (log := self.logs[number]) is not None:
            log.add(settled)
        yield from self._grown(number, settled.thought, settled.text)
        yield from self._called(number, settled.tool_calls)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._reports(self._progress.rest(number, end.account))
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

    def _reports(self, news: Iterable[Progress]) -> Iterator[Frame]:
        return (self.reported(number, progress) for number, progress in news)

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


WATCH_S = 0.1  # how often the engine's state is looked at
Progress = tuple[int, dict[str, Any]]
"""A reply's number, and the progress of its prompt."""


class PromptProgress:
    """The prompts of one HTTP request. The first progress of each says what a slot held already,
    and the last one that all is encoded."""

    def __init__(self, service: Service, requests: Sequence[Request], is_wanted: bool) -> None:
        self._engine = service.engine
        self._numbers = {request.id: number for number, request in enumerate(requests)}
        # Tokens that were reported, of prompts that are not complete; None: none yet.
        self._open: dict[int, int | None] = dict.fromkeys(range(len(requests)) if is_wanted else ())

    @property
    def watches_s(self) -> float | None:
        """How often there may be something new; None where nothing more is wanted."""
        return WATCH_S if self._open else None

    def news(self) -> Iterator[Progress]:
        """What has been encoded since the last time."""
        if not self._open:
            return
        for row in self._engine.state().running:
            number = self._numbers.get(row.id)
            if number is not None and number in self._open:
                yield from self._of(number, row)

    def rest(self, number: int, account: Account | None = None) -> Iterator[Progress]:
        """Before a reply's first text, or, with its account, at its end."""
        if number not in self._open:
            return
        yield from (each for each in self.news() if each[0] == number)
        if account is not None and number in self._open:
            total, cache = account.prompt_tokens, account.cached_tokens
            yield from self._steps(number, total, cache, total, 1e3 * account.prefill_s)

    def _of(self, number: int, row: RowState) -> Iterator[Progress]:
        age_ms = 1e3 * row.age_s
        return self._steps(number, row.prompt_tokens, row.cached_tokens, row.encoded_tokens, age_ms)

    def _steps(
        self, number: int, total: int, cache: int, processed: int, time_ms: float
    ) -> Iterator[Progress]:
        """From what was reported last; of a prompt that begins, what a slot held of it, first."""
        reported = self._open[number]
        counts = [cache, processed] if reported is None else [processed]
        for count in counts:
            if reported is None or count > reported:
                reported = count
                fields = {"total": total, "cache": cache, "processed": count, "time_ms": time_ms}
                yield number, fields
        self._open[number] = reported
        if reported is not None and reported >= total:
            del self._open[number]
