"""Many requests of one command to an engine: a few at a time, their outcomes in order."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from sfumato.api import Model
from sfumato.cli import generation, terminal
from sfumato.engine import Engine, EngineConfig, own_engine
from sfumato.engine.errors import EngineDead, NotReady
from sfumato.engine.events import Handle, RequestFailed

T = TypeVar("T")
R = TypeVar("R")
CONTEXT = 4_096  # positions of a slot; a larger one is made for a request that needs it


@dataclass
class Outcome(Generic[T, R]):
    """A row that is asked about: its result, or why there is none, once there is either."""

    row: T
    handle: Handle[R] | None = None  # None: the engine has refused it
    result: R | None = None
    error: str = ""


def request_rows(
    args: argparse.Namespace,
    model: Model,
    submit: Callable[[Engine, T], Handle[R]],
    rows: Iterable[T],
    total: int,
    before: int = 0,
    what: str = "deciding rows",
    ahead: int = 2,
) -> Iterator[Outcome[T, R]]:
    """Each row's outcome, in order, with their progress on standard error; after Ctrl-C no more
    come. submit: as `outcomes` takes it, with the engine; total, before, what: as `rows_progress`
    takes them; ahead: requests for each of the engine's slots; with two, none waits for this
    thread. Raises ValueError as `outcomes` and `running` do."""
    with (
        generation.counted() as presses,
        running(model, args.concurrency) as engine,
        terminal.rows_progress(total, before, what=what) as show,
    ):
        ask, at_a_time = partial(submit, engine), ahead * args.concurrency
        results = outcomes(ask, rows, at_a_time, lambda: presses.count > 0)
        for done, outcome in enumerate(results, 1):
            yield outcome
            show(done)


def outcomes(
    submit: Callable[[T], Handle[R]],
    rows: Iterable[T],
    at_a_time: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome[T, R]]:
    """Each row's outcome, in order. submit: gives a row to the engine, and raises ValueError where
    that refuses it; stopped: when it returns True nothing more comes, and what is under way is
    cancelled. Raises ValueError where the engine does not go on."""
    waiting = iter(rows)
    under_way: deque[Outcome[T, R]] = deque()
    try:
        while not stopped():
            while len(under_way) < at_a_time and (row := next(waiting, None)) is not None:
                under_way.append(_submitted(submit, row))
            if not under_way:
                return
            outcome = under_way.popleft()
            try:
                outcome.result = outcome.handle.result() if outcome.handle else None
            except RequestFailed as failed:
                outcome.error = str(failed)
            if stopped():
                return
            yield outcome
    finally:
        for outcome in under_way:
            if outcome.handle is not None:
                outcome.handle.cancel()


def _submitted(submit: Callable[[T], Handle[R]], row: T) -> Outcome[T, R]:
    try:
        return Outcome(row, submit(row))
    except ValueError as error:
        return Outcome(row, error=str(error))
    except (EngineDead, NotReady) as error:
        raise ValueError(f"the engine has stopped: {error}; the same command goes on") from error


@contextmanager
def running(model: Model, at_a_time: int) -> Iterator[Engine]:
    """An engine for so many requests at a time. Raises ValueError where the memory is too small."""
    context = min(CONTEXT, model.config.context_length)
    layout = EngineConfig(at_a_time, context, queue=2 * at_a_time)
    engine = own_engine(model, layout, "lower --concurrency, or free some memory").start()
    try:
        yield engine
    finally:
        engine.close(drain_s=0)
