"""Takes the figures of a server, through its streaming chat API alone.

Times are taken by the client's clock. What only the server can know (steps, prefill) comes from
`usage` and from llama-server's `timings` with a `diffusion` part; what they lack stays absent.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

from sfumato.bench.report import (
    Case,
    CaseReport,
    Job,
    Report,
    Values,
    Work,
    conversation,
    take,
)
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

_WORDS = ("the", "sun", "and", "moon", "rise", "over", "a", "quiet", "sea")  # mostly a token each
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # what of a delta is visible
_LARGEST = 1e15  # no figure of a reply comes near it, and sums and quotients of such stay finite


def measure(
    endpoint: Endpoint,
    fields: Mapping[str, Any],
    work: Work,
    cases: list[Case],
    progress: Callable[[int, int], None] = lambda number, count: None,
) -> Report:
    """Every case, one after another; KeyboardInterrupt ends it with what is measured so far.

    fields: the model's name, and what else every request says besides messages, length and seed;
    progress: (requests done, requests in all).  Raises ServerError where a warm-up fails, and
    ValueError where every measured request does; single failures are part of the report.
    """

    def one(result: CaseReport, done: Callable[[], None]) -> None:
        ask = partial(_request, endpoint, fields, result.case.max_tokens)
        for job in work.warmups():
            ask(job)
            done()
        began = time.perf_counter()
        # Its threads are daemons: after Ctrl-C the program does not wait for replies on their way.
        with ThreadPool(result.case.concurrency or 1) as pool:
            for values in pool.imap_unordered(partial(_or_failure, ask), work.requests()):
                done()
                if isinstance(values, ServerError):
                    result.failures.append(str(values))
                else:
                    result.add(values)
                    result.finished(time.perf_counter() - began)

    report = Report({"model": printable(fields["model"]), "url": endpoint.url})
    return take(report, work, cases, one, progress)


def _or_failure(ask: Callable[[Job], Values], job: Job) -> Values | ServerError:
    try:
        return ask(job)
    except ServerError as error:
        return error


def _request(endpoint: Endpoint, fields: Mapping[str, Any], max_tokens: int, job: Job) -> Values:
    """The figures of one request. Raises ServerError."""
    prompt, seed = job
    if isinstance(prompt, int):
        # Drawn anew for each seed: a server's prefix cache must not spare it the prefill.
        prompt = conversation(" ".join(random.Random(seed).choices(_WORDS, k=prompt)))
    body = {
        "messages": prompt,
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    values: Values = {}
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    finished = False
    start = time.perf_counter()
    for chunk in endpoint.stream_chat(body):
        seconds = [time.perf_counter() - start]
        usage = _part(chunk, "usage") or usage
        timings = _part(chunk, "timings") or timings
        choice = _part(chunk, "choices", 0)
        delta = _part(choice, "delta")
        if any("draft" in part for part in (chunk, choice, delta)):
            values.setdefault("first_draft_s", seconds)
        if any(delta.get(key) for key in _TEXTS):
            values.setdefault("first_token_s", seconds)
            values["last_token_s"] = seconds
        finished = finished or choice.get("finish_reason") is not None
    total = time.perf_counter() - start
    if not finished:
        raise ServerError(f"{endpoint.url}: the stream ended before the reply did")
    return values | {"total_s": [total]} | _server_figures(usage, timings, total)


def _server_figures(usage: Mapping[str, Any], timings: Mapping[str, Any], total: float) -> Values:
    """The figures that a server reports of a reply, by metric."""
    diffusion = _part(timings, "diffusion")
    tokens, steps = _number(usage, "completion_tokens"), _number(diffusion, "steps")
    blocks, generating = _number(diffusion, "blocks"), _number(timings, "predicted_ms")
    figures = {
        "prompt_tokens": _number(usage, "prompt_tokens"),
        "output_tokens": tokens,
        "visible_tps": _quotient(tokens, total),
        "prefill_tps": _number(timings, "prompt_per_second"),
        "step_ms": _number(diffusion, "ms_per_step"),
        "steps_per_canvas": _quotient(steps, blocks),
        "tokens_per_forward": _number(diffusion, "tokens_per_forward") or _quotient(tokens, steps),
        "canvas_tps": _number(diffusion, "canvas_tokens_per_second"),
        "blocks_per_s": _quotient(blocks, generating and generating / 1e3),
    }
    return {key: [value] for key, value in figures.items() if value is not None}


def _part(chunk: Any, *path: str | int) -> Mapping[str, Any]:
    """The object at the end of a path of keys, empty where there is none."""
    try:
        for key in path:
            chunk = chunk[key]
    except (KeyError, IndexError, TypeError):
        return {}
    return chunk if isinstance(chunk, Mapping) else {}


def _number(part: Mapping[str, Any], key: str) -> float | None:
    """The figure under a key; None where there is none, or one that cannot be."""
    value = part.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _LARGEST else None


def _quotient(over: float | None, under: float | None) -> float | None:
    quotient = over / under if over is not None and under else None
    return quotient if quotient is not None and quotient <= _LARGEST else None


_LONGEST_LINE = 16 << 20  # bytes of an event; a canvas with all its entropies is far shorter
_LONGEST_BODY = 1 << 20


def printable(text: str) -> str:
    """A line of a server's words, without what controls a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


class ServerError(OSError):
    """The server cannot be reached, refuses, or breaks off. The message says where and why, and is
    printable whatever the server sent."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True)
class Endpoint:
    """An API by its base URL, such as http://localhost:8000/v1."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0  # without a byte from the server

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number
            usable = False
        if not usable or parts.query or parts.fragment or parts.username:
            raise Refused("url", f"{quoted(self.url)} is not like http://localhost:8000/v1")

    def models(self) -> list[str]:
        """The names of the server's models. Raises ServerError."""
        with self._request("GET", "/models") as response:
            try:
                listed = json.loads(response.read(_LONGEST_BODY))["data"]
                return [str(model["id"]) for model in listed]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ServerError(f"{self.url}/models: lists no models; name one with -m") from None

    def stream_chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion as they come. Raises ServerError, on the way too."""
        with self._request("POST", "/chat/completions", body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise ServerError(f"{self.url}: answers with {kind}, not with a stream of events")
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield self._chunk(data)

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        parts = urlsplit(self.url)
        assert parts.hostname
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        text = None if body is None else json.dumps(body)
        with closing(kind(parts.hostname, parts.port, timeout=self.timeout_s)) as connection:
            try:
                connection.request(method, parts.path.rstrip("/") + path, text, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ServerError(f"{self.url}{path}: HTTP {response.status}{_why(response)}")
                yield response
            except ServerError:
                raise
            except (OSError, HTTPException) as error:
                why = str(error) or type(error).__name__
                raise ServerError(f"{self.url}{path}: {why}") from error

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerError(f"{self.url}: sends {quoted(data)}, which is no chunk of a reply")
        if chunk.get("error"):
            raise ServerError(f"{self.url}: {_message(chunk)}")
        return chunk


def _events(response: HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; comments, which keep the connection alive, and other fields
    are passed over."""
    lines: list[str] = []
    while line := response.readline(_LONGEST_LINE):
        if not line.endswith(b"\n") and len(line) == _LONGEST_LINE:
            raise ServerError(f"sends an event of more than {_LONGEST_LINE >> 20} MiB")
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            lines.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and lines:
            yield "\n".join(lines)
            lines.clear()
    if lines:  # the last event lacks its empty line
        yield "\n".join(lines)


def _why(response: HTTPResponse) -> str:
    text = response.read(_LONGEST_BODY).decode(errors="replace")
    try:
        text = _message(json.loads(text))
    except (ValueError, RecursionError):
        text = " ".join(text.split())[:200]
    return f": {text}" if text else ""


def _message(answer: Any) -> str:
    """The message of an error object; servers have several forms of it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
