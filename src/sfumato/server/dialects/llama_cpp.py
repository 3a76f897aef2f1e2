"""llama-server's own completion: POST /completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfumato.engine import Finished, Request, Settled
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.sampling import request_fields, seeds_of
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Dialect, Frame, Renderer
from sfumato.server.http.errors import bad_request
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.llama_cpp import LlamaBody, LlamaSampling
from sfumato.server.service import Service

PATH = "/completion"
_STOP_TYPES = {"eos": "eos", "max_tokens": "limit", "stop": "word", "cancelled": "none"}


def parse(service: Service, body: LlamaBody) -> list[Request]:
    """Raises ApiError."""
    ids = service.raw_prompt(body.prompt, PATH)
    if not ids:
        raise bad_request("prompt: is empty", "prompt")
    seed = None if body.seed == -1 else body.seed  # as llama-server reads it
    request = Request(
        ids=ids,
        max_tokens=service.limit(body.n_predict, len(ids), body.canvas_length),
        seed=seeds_of(seed, 1)[0],
        grammar=grammar_of(body),
        **request_fields(body, service.model, PATH),
    )
    return [request]


class LlamaRenderer(Renderer):
    """One reply without choices; the last frame of a stream says stop."""

    def __init__(self, service: Service, body: LlamaSampling, requests: Sequence[Request]) -> None:
        self._service, self._notes, self._sent = service, openai_objects.notes(body), 0
        self._fields = body.response_fields
        # A text that is only encoded for later requests has nothing in it.
        self._is_empty = getattr(body, "n_predict", None) == 0

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        text = "" if self._is_empty else collected.finished.reply.text
        answer = {"content": text, **self._end(collected.finished)}
        return answer if self._fields is None else _only(answer, self._fields)

    def extra(self, fields: Frame) -> Frame:
        return {"index": 0, "content": "", "stop": False} | fields

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield from self._texts(settled.text)

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield from self._texts(end.reply.text[self._sent :])
        yield {"content": "", **self._end(end)}

    def _texts(self, text: str) -> Iterable[Frame]:
        self._sent += len(text)
        text = "" if self._is_empty else text
        for piece in pieces(text):
            yield self.extra({"content": piece})

    def _end(self, end: Finished) -> Frame:
        """All but the text: what llama-server sends at the end."""
        reply, account = end.reply, end.account
        notes = [*self._notes, *warnings(self._service.model.embedded, reply)]
        return {
            "index": 0,
            "id_slot": -1 if account.slot is None else account.slot,
            "stop": True,
            "stop_type": _STOP_TYPES[reply.stop_reason],
            "model": self._service.name,
            "tokens_predicted": account.output_tokens,
            "tokens_evaluated": account.prompt_tokens,
            "tokens_cached": account.cached_tokens,
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


LLAMA_COMPLETION = Dialect(
    name="completion",
    path=PATH,
    tag="llama-server",
    help="A completion as llama-server has it.",
    body_type=LlamaBody,
    parse=parse,
    renderer=LlamaRenderer,
    streams=lambda body: bool(body.stream),
)
