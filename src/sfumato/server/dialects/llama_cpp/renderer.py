"""A reply as llama-server's object, which has no choices: one body, or the frames of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sfumato.engine import Finished, Request, Settled
from sfumato.server.dialects.llama_cpp.settings import generation_settings
from sfumato.server.dialects.llama_cpp.token_log import LlamaLog, ids_of, probabilities
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.logprobs import Logged, logged
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.prompt_progress import Progress, PromptProgress
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Answer, Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.llama_cpp import LlamaSampling
from sfumato.server.service import Service

_STOP_TYPES = {"eos": "eos", "max_tokens": "limit", "stop": "word", "cancelled": "none"}


class LlamaRenderer(Renderer):
    """Replies without choices: one, or a list of those to several prompts. The last frame of each
    in a stream says stop."""

    def __init__(self, service: Service, body: LlamaSampling, requests: Sequence[Request]) -> None:
        self._service, self._requests = service, requests
        self._notes = openai_objects.notes(body)
        self._sent = [0] * len(requests)
        self._fields, self._streams = body.response_fields, bool(body.stream)
        self._returns_tokens = bool(getattr(body, "return_tokens", False))
        self._alternatives = getattr(body, "n_probs", None) or 0
        self._as_probs = bool(getattr(body, "post_sampling_probs", False))
        self.keeps_settled = self._alternatives > 0
        self._logs = [self._log(request) for request in requests]
        self._progress = PromptProgress(service, requests, bool(body.return_progress))

    def _log(self, request: Request) -> LlamaLog | None:
        """None where the settled canvases are not those of a reply: a fill's have the suffix."""
        if request.parts is not None:
            return None
        return LlamaLog(self._service, self._alternatives)

    def body(self, replies: Sequence[CollectedReply]) -> Answer:
        if len(replies) == 1:
            return self._answer(0, replies[0])
        return (self._answer(number, collected) for number, collected in enumerate(replies))

    def _answer(self, number: int, collected: CollectedReply) -> dict[str, Any]:
        reply = collected.finished.reply
        answer = {
            **self._end(number, collected.finished),
            "content": reply.text,
            "tokens": reply.token_ids if self._returns_tokens else [],
        }
        if self._alternatives and (log := self._log(self._requests[number])) is not None:
            entries = [entry for _, own in logged(log, collected) for entry in own]
            answer["completion_probabilities"] = probabilities(entries, self._as_probs)
        return _only(answer, self._fields) if self._fields else answer

    def extra(self, fields: Frame) -> Frame:
        return {"index": 0, "content": "", "tokens": [], "stop": False} | fields

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
        yield from self._texts(number, settled.text)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._reports(self._progress.rest(number, end.account))
        yield from self._texts(number, end.reply.text[self._sent[number] :])
        if (log := self._logs[number]) is not None:
            yield from self._parts(number, log.end())
        yield {**self._end(number, end), "content": "", "tokens": []}

    def _texts(self, number: int, text: str) -> Iterable[Frame]:
        self._sent[number] += len(text)
        log = self._logs[number]
        if log is not None:
            yield from self._parts(number, log.take(text))
            return
        for piece in pieces(text):
            yield self.extra({"index": number, "content": piece})

    def _parts(self, number: int, parts: Sequence[Logged]) -> Iterator[Frame]:
        """Text with its tokens."""
        for text, entries in parts:
            frame = self.extra({"index": number, "content": text, "tokens": ids_of(entries)})
            if self._alternatives:
                frame["completion_probabilities"] = probabilities(entries, self._as_probs)
            yield frame

    def _end(self, number: int, end: Finished) -> Frame:
        """All but the text and its tokens: what llama-server sends at the end."""
        reply, account, request = end.reply, end.account, self._requests[number]
        notes = [*self._notes, *warnings(self._service.model.embedded, reply)]
        seed, decode = account.seed, self._service.model.tokenizer.decode
        return {
            "index": number,
            "id_slot": -1 if account.slot is None else account.slot,
            "stop": True,
            "stop_type": _STOP_TYPES[reply.stop_reason],
            "stopping_word": reply.stop or "",
            "model": self._service.name,
            "tokens_predicted": account.output_tokens,
            "tokens_evaluated": account.prompt_tokens,
            "tokens_cached": account.cached_tokens,
            "generation_settings": generation_settings(
                self._service, request, seed, self._streams, self._as_probs
            ),
            "prompt": decode(request.ids or (), skip_special=False),
            "has_new_line": "\n" in reply.text,
            "truncated": False,
            "timings": openai_objects.timings(account),
            **({"warnings": notes} if notes else {}),
        }


def _only(answer: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Those fields of an answer that there are, each named by its path: "timings/prompt_n"."""
    fields = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            fields[path] = value
    return fields
