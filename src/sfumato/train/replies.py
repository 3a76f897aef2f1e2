"""Many requests answered by one engine, and what they come to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sfumato.api import Model
from sfumato.engine import Account, Engine, EngineConfig, Finished, Handle, Request
from sfumato.options.limits import MOST_STEPS

ROWS = 32  # requests at a time


@dataclass(frozen=True)
class Score:
    """What a set of tasks came to."""

    tasks: int
    exact: float  # share of right ones; of replies, those equal to the expected one
    steps: float  # denoising steps per canvas, mean
    most_steps: int
    converged: float  # share of canvases that ended before the step cap


def make_score(right: Iterable[bool], steps: Sequence[int], ends: Sequence[str]) -> Score:
    """right: of each task; steps and ends: of each canvas."""
    exact = list(right)
    return Score(
        len(exact),
        sum(exact) / len(exact),
        sum(steps) / len(steps),
        max(steps),
        ends.count("converged") / len(ends),
    )


def replies(
    model: Model,
    requests: Sequence[Request],
    canvases: int,
    answered: Callable[[], None] = lambda: None,
) -> list[tuple[str, Account]]:
    """The text and the account of each request, in their order; `ROWS` at a time, and a row that
    ends makes room. canvases: of a reply at most; answered: called after each."""
    prompts = [model.prompt_ids(messages=request.messages) for request in requests]
    engine = _engine(model, max(map(len, prompts)), canvases)
    waiting, running = deque(enumerate(requests)), list[tuple[int, Handle]]()
    results: dict[int, tuple[str, Account]] = {}
    while waiting or running:
        while waiting and len(running) < ROWS:
            number, request = waiting.popleft()
            running.append((number, engine.submit(request)))
        engine.step()
        for number, handle in [row for row in running if row[1].terminal is not None]:
            running.remove((number, handle))
            reply = handle.result()
            assert isinstance(handle.terminal, Finished)
            text = model.tokenizer.decode(reply.token_ids)
            results[number] = text, handle.terminal.account
            answered()
    engine.close()
    return [results[number] for number in range(len(requests))]


def score_of(accounts: Sequence[Account], right: Iterable[bool]) -> Score:
    """The figures of replies, of which these are right."""
    steps = [count for account in accounts for count in account.steps]
    ends = [end for account in accounts for end in account.convergence]
    return make_score(right, steps, ends)


def _engine(model: Model, longest_prompt: int, canvases: int) -> Engine:
    return Engine(
        model,
        EngineConfig(
            slots=ROWS,
            context=longest_prompt + (canvases - 1) * model.config.canvas_length,
            snapshot_bytes=0,
            max_steps=MOST_STEPS,
            request_timeout_s=None,
        ),
    )
