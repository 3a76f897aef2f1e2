"""Decides about many states with one engine, a few at a time, in the order of the rows.

Knows no files: rows come in, and each goes out with its answers or with why there are none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from sfumato.engine.errors import EngineDead, NotReady, RequestFailed

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.engine.decision import DecisionRequest
    from sfumato.engine.events import Decided

CONTEXT = 4_096  # positions of a slot; a larger one is made for a state that needs it
T = TypeVar("T")


class Pending(Protocol):
    """A request that is under way."""

    def result(self) -> Decided:
        """Waits. Raises RequestFailed."""

    def cancel(self) -> None:
        """Ends it early."""


class Decider(Protocol):
    """What decides: `Engine` does."""

    def decide(self, request: DecisionRequest) -> Pending:
        """Raises ValueError, NotReady, EngineDead."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A row with its answers, or with why there are none."""

    row: T
    decided: Decided | None
    error: str = ""


def outcomes(
    decider: Decider,
    rows: Iterable[T],
    request: Callable[[T], DecisionRequest],
    at_a_time: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome[T]]:
    """Each row's outcome, in order. stopped: when it returns True nothing more comes, and what is
    under way is cancelled. Raises ValueError where the engine does not go on."""
    under_way: deque[tuple[T, Pending | str]] = deque()
    try:
        for row in rows:
            if stopped():
                return
            under_way.append((row, _submitted(decider, request(row))))
            if len(under_way) >= at_a_time:
                outcome = _outcome(*under_way.popleft())
                if stopped():
                    return
                yield outcome
        while under_way:
            outcome = _outcome(*under_way.popleft())
            if stopped():
                return
            yield outcome
    finally:
        for _, pending in under_way:
            if not isinstance(pending, str):
                pending.cancel()


def _submitted(decider: Decider, request: DecisionRequest) -> Pending | str:
    try:
        return decider.decide(request)
    except ValueError as error:
        return str(error)
    except (EngineDead, NotReady) as error:
        raise ValueError(f"the engine has stopped: {error}; the same command goes on") from error


def _outcome(row: T, pending: Pending | str) -> Outcome[T]:
    if isinstance(pending, str):
        return Outcome(row, None, pending)
    try:
        return Outcome(row, pending.result())
    except RequestFailed as error:
        return Outcome(row, None, str(error))


@contextmanager
def running(model: Model, at_a_time: int) -> Iterator[Decider]:
    """An engine for so many states at a time. Raises ValueError where the memory is too small."""
    from sfumato.engine import Engine, EngineConfig, EngineError

    context = min(CONTEXT, model.config.context_length)
    config = EngineConfig(
        slots=at_a_time, context=context, queue=2 * at_a_time, request_timeout_s=None
    )
    try:
        engine = Engine(model, config).start()
    except EngineError as error:
        raise error.advising("lower --concurrency, or free some memory") from error
    try:
        yield engine
    finally:
        engine.close(drain_s=0)
