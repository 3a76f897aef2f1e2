"""Sends a benchmark's requests to an engine, several at a time, and takes the figures of each.

The engine has no thread: taking the figures steps it. Knows no reports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sfumato.bench.metrics import Values
from sfumato.engine import Account, Engine, Event, Failed, Finished, Request, Settled

INTERRUPTED = "interrupted"

MakeRequest = Callable[[float], Request]
"""When the request began, by the engine's clock → the request. Making it is part of its time."""


@dataclass(frozen=True)
class RequestFigures:
    """What was measured of a request."""

    values: Values
    failure: str | None = None  # why there is no reply


class Measurement:
    """One request on its way; its figures so far can be read at any time."""

    def __init__(self, engine: Engine, make: MakeRequest, canvas_length: int) -> None:
        """Submits the request. Raises what the engine raises."""
        self.values: Values = {}
        self.failure: str | None = None
        self._began, self._length = engine.now(), canvas_length
        self.handle = engine.submit(make(self._began), self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, Settled):
            seconds = time.perf_counter() - self._began
            self.values.setdefault("first_commit_s", [seconds])
            if event.token_ids:
                self.values.setdefault("first_token_s", [seconds])
                self.values["last_token_s"] = [seconds]
        elif isinstance(event, Finished):
            self.values |= _of_steps(event.account) | _of_reply(event.account, self._length)
        elif isinstance(event, Failed):
            self.failure = f"{event.kind}: {event.message}"
            self.values.pop("last_token_s", None)  # the reply has no last token
            if event.account is not None:
                self.values |= _of_steps(event.account)


def run_requests(
    engine: Engine,
    requests: Iterable[MakeRequest],
    concurrency: int,
    canvas_length: int,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[RequestFigures]:
    """The figures of every request as it ends, `concurrency` at a time; of those under way where
    the consumer or a step is interrupted. begin: called before each. Free slots are
    emptied before each request, so that each request encodes its own prompt."""
    waiting, running = deque(requests), []  # type: tuple[deque[MakeRequest], list[Measurement]]
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                begin()
                engine.reset_prefix_cache()
                running.append(Measurement(engine, waiting.popleft(), canvas_length))
            engine.step()
            for request in [r for r in running if r.handle.terminal is not None]:
                running.remove(request)
                yield RequestFigures(request.values, request.failure)
    except KeyboardInterrupt:
        for request in running:
            yield RequestFigures(request.values, INTERRUPTED)
        raise


def _of_steps(account: Account) -> Values:
    """Figures that a reply without an end has too."""
    values: Values = {"setup_s": [account.queue_s]}
    values["step_ms"] = [1e3 * seconds for seconds in account.step_s]
    if account.first_draft_s is not None:
        values["first_draft_s"] = [account.first_draft_s]
    return values


def _of_reply(account: Account, canvas_length: int) -> Values:
    """Figures of a complete reply; a quotient by zero is left out."""
    canvases, encoded = len(account.convergence), account.prompt_tokens - account.cached_tokens
    quotients = {
        "prefill_tps": (encoded, encoded and account.prefill_s),
        "commit_ms": (account.commit_s * 1e3, canvases - 1),
        "tokens_per_forward": (account.output_tokens, sum(account.steps)),
        "visible_tps": (account.output_tokens, account.total_s),
        "canvas_tps": (canvases * canvas_length, account.denoise_s),
        "blocks_per_s": (canvases, account.denoise_s + account.commit_s),
    }
    values = {key: [over / under] for key, (over, under) in quotients.items() if under > 0}
    values["total_s"] = [account.total_s]
    values["steps_per_canvas"] = [float(count) for count in account.steps]
    values["prompt_tokens"] = [float(account.prompt_tokens)]
    return values | {"output_tokens": [float(account.output_tokens)]}
