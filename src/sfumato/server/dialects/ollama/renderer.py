"""A reply as Ollama's objects: one body, or lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished, Request, Settled
from sfumato.server.dialects.ollama.times import nanoseconds, now
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.logprobs import Logged, log_of, logged
from sfumato.server.dialects.shared.openai_tools import ignored_tools, unknown_calls
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.dialects.shared.unsent import Unsent
from sfumato.server.examples import warnings
from sfumato.server.http.dialect import Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.wire import Wire, line
from sfumato.server.schemas.ollama import OllamaGeneration
from sfumato.server.service import Service
from sfumato.text.reply import ToolCall

# JSON may begin with a space, and clients would read an empty line as a broken object.
WIRE = Wire("application/x-ndjson", line, keepalive=" ")


class OllamaRenderer(Renderer):
    """Text and thought in pieces, each in an object of its own; the last one says done."""

    def __init__(
        self, service: Service, body: OllamaGeneration, requests: Sequence[Request]
    ) -> None:
        (request,) = requests
        self._service, self._request = service, request
        options = () if body.options is None else openai_objects.notes(body.options)
        self._notes = [*openai_objects.notes(body), *options]
        self._notes += ignored_tools(request.tools, service.model)
        self.keeps_settled = bool(body.logprobs)
        self._alternatives = body.top_logprobs or 0
        self._unsent = Unsent()
        self._log = self._new_log()
        self._calls = 0  # that were sent

    def content(self, text: str, thought: str, calls: Sequence[ToolCall] = ()) -> Frame:
        """What a part of a reply stands in."""
        message: Frame = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [
                _call(call, number) for number, call in enumerate(calls, self._calls)
            ]
        return {"message": message}

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        end, log = collected.finished, self._new_log()
        reply = end.reply
        logs: Frame = {}
        if log is not None:
            logs = {"logprobs": [entry for _, tokens in logged(log, collected) for entry in tokens]}
        shown = self.content(reply.text, reply.thought or "", reply.tool_calls)
        return self._part(shown | self._end(end) | logs)

    def extra(self, fields: Frame) -> Frame:
        return self._part(self.content("", "") | {"done": False} | fields)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        if self._log is not None:
            self._log.add(settled)
        yield from self._parts(*self._unsent.of(settled))

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        thought, text, calls = self._unsent.rest(end.reply)
        yield from self._parts(thought, text, ())
        if self._log is not None:
            yield from self._logged(self._log.end())
        yield from self._parts("", "", calls)
        yield self._part(self.content("", "") | self._end(end))

    def _new_log(self) -> Any:
        if not self.keeps_settled:
            return None
        return log_of(self._service, self._alternatives, self._request, by_id=False)

    def _parts(self, thought: str, text: str, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        for piece in pieces(thought):
            yield self.extra(self.content("", piece))
        if self._log is not None:
            yield from self._logged(self._log.take(text))
        else:
            for piece in pieces(text):
                yield self.extra(self.content(piece, ""))
        if calls:
            yield self.extra(self.content("", "", calls))
            self._calls += len(calls)

    def _logged(self, parts: Sequence[Logged]) -> Iterable[Frame]:
        for text, tokens in parts:
            yield self.extra(self.content(text, "") | {"logprobs": tokens})

    def _part(self, fields: Frame) -> Frame:
        return {"model": self._service.name, "created_at": now(), **fields}

    def _end(self, end: Finished) -> Frame:
        reply = end.reply
        lines = [*self._notes, *self._warnings(reply)]
        reason = "length" if reply.stop_reason == "max_tokens" else "stop"
        durations = durations_of(end.account)
        done = {"done": True, "done_reason": reason} | durations
        return done | ({"warnings": lines} if lines else {})

    def _warnings(self, reply: Reply) -> list[str]:
        embedded = self._service.model.embedded
        return [*warnings(embedded, reply), *unknown_calls(self._request.tools, reply)]


class GenerateRenderer(OllamaRenderer):
    """The same as a completion."""

    def content(self, text: str, thought: str, calls: Sequence[ToolCall] = ()) -> Frame:
        return {"response": text} | ({"thinking": thought} if thought else {})


def durations_of(account: Account) -> Frame:
    """Tokens, and times in nanoseconds; nothing is loaded for a request."""
    return {
        "total_duration": nanoseconds(account.total_s),
        "load_duration": 0,
        "prompt_eval_count": account.prompt_tokens,
        "prompt_eval_duration": nanoseconds(account.prefill_s),
        "eval_count": account.output_tokens,
        "eval_duration": nanoseconds(account.denoise_s + account.commit_s),
    }


def _call(call: ToolCall, index: int) -> Frame:
    return {
        "id": openai_objects.new_id("call"),
        "function": {"index": index, "name": call.name, "arguments": dict(call.arguments)},
    }
