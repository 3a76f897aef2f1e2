"""Takes the figures of a server, through its streaming chat API alone.

Times are taken by the client's clock. What only the server can know (steps, prefill) comes from
`usage` and from llama-server's `timings` with a `diffusion` part; what they lack stays absent.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.bench.client import Endpoint, ServerError, printable
from sfumato.bench.metrics import Values
from sfumato.bench.report import CaseReport, Report
from sfumato.bench.workload import Case, Messages, Prompt, Work, conversation

_WORDS = ("the", "sun", "and", "moon", "rise", "over", "a", "quiet", "sea")  # mostly a token each
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # what of a delta is visible
_LARGEST = 1e15  # no figure of a reply comes near it, and sums and quotients of such stay finite


@dataclass(frozen=True)
class RemoteModel:
    """A server's model, and what every request to it says besides messages, length and seed."""

    endpoint: Endpoint
    name: str
    fields: Mapping[str, Any]


def measure(
    model: RemoteModel,
    work: Work,
    cases: list[Case],
    progress: Callable[[int, int], None] = lambda number, count: None,
) -> Report:
    """Every case, one after another; KeyboardInterrupt ends it with what is measured so far.

    progress: (requests done, requests in all).  Raises ServerError where a warm-up fails, or every
    measured request; single failures are part of the report.
    """
    report = Report({"model": printable(model.name), "url": model.endpoint.url})
    count = len(cases) * (work.warmup + len(work.requests()))
    numbers = iter(range(1, count + 1))
    try:
        for case in cases:
            result = CaseReport(case)
            report.cases.append(result)
            for prompt, seed in work.warmups():
                _request(model, prompt, seed, case.max_tokens)
                progress(next(numbers), count)
            began = time.perf_counter()
            for values in _together(model, work, case):
                progress(next(numbers), count)
                if isinstance(values, ServerError):
                    result.failures.append(str(values))
                else:
                    result.add(values)
                    result.finished(time.perf_counter() - began)
    except KeyboardInterrupt:
        report.interrupted = True
    failures = [failure for result in report.cases for failure in result.failures]
    if failures and not any(result.requests for result in report.cases):
        raise ServerError(f"all {len(failures)} requests failed, the first: {failures[0]}")
    return report


def _together(model: RemoteModel, work: Work, case: Case) -> Iterator[Values | ServerError]:
    """The figures of every request, or why it failed, as they end; `case.concurrency` at a time."""
    waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
    for job in work.requests():
        waiting.put(job)
    ended: queue.SimpleQueue[Values | Exception] = queue.SimpleQueue()
    stopped = threading.Event()

    def client() -> None:
        while not stopped.is_set():
            try:
                prompt, seed = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                ended.put(_request(model, prompt, seed, case.max_tokens))
            except Exception as error:
                ended.put(error)

    for _ in range(case.concurrency or 1):
        # A daemon: after Ctrl-C the program does not wait for replies on their way.
        threading.Thread(target=client, daemon=True).start()
    try:
        for _ in work.requests():
            values = ended.get()
            if isinstance(values, Exception) and not isinstance(values, ServerError):
                raise values
            yield values
    finally:
        stopped.set()


def _request(model: RemoteModel, prompt: Prompt, seed: int, max_tokens: int) -> Values:
    """The figures of one request. Raises ServerError."""
    body = {
        "model": model.name,
        "messages": _messages(prompt, seed),
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **model.fields,
    }
    values: Values = {}
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    finished = False
    start = time.perf_counter()
    for chunk in model.endpoint.stream_chat(body):
        seconds = [time.perf_counter() - start]
        usage = _part(chunk, "usage") or usage
        timings = _part(chunk, "timings") or timings
        choice = _choice(chunk)
        delta = _part(choice, "delta")
        if any("draft" in part for part in (chunk, choice, delta)):
            values.setdefault("first_draft_s", seconds)
        if any(delta.get(key) for key in _TEXTS):
            values.setdefault("first_token_s", seconds)
            values["last_token_s"] = seconds
        finished = finished or choice.get("finish_reason") is not None
    total = time.perf_counter() - start
    if not finished:
        raise ServerError(f"{model.endpoint.url}: the stream ended before the reply did")
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


def _messages(prompt: Prompt, seed: int) -> Messages:
    if not isinstance(prompt, int):
        return prompt
    # Drawn anew for each seed: a server's prefix cache must not spare it the prefill.
    return conversation(" ".join(random.Random(seed).choices(_WORDS, k=prompt)))


def _choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of a chunk; a chunk of figures alone has none."""
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, Mapping) else {}


def _part(chunk: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key, empty where there is none."""
    part = chunk.get(key)
    return part if isinstance(part, Mapping) else {}


def _number(part: Mapping[str, Any], key: str) -> float | None:
    """The figure under a key; None where there is none, or one that cannot be."""
    value = part.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _LARGEST else None


def _quotient(over: float | None, under: float | None) -> float | None:
    quotient = over / under if over is not None and under else None
    return quotient if quotient is not None and quotient <= _LARGEST else None
