"""`DecisionDialect`: one form of typed decisions, as a value that the shared route is given.

A dialect turns a body into the engine's request and its answers into a body; bodies, threads,
disconnects and statuses are the route's. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sfumato.engine import Decided, DecisionRequest
from sfumato.server.http.errors import OPENAI_ERRORS, ErrorForm
from sfumato.server.schemas.decisions import DecisionBody
from sfumato.server.service import Service

B = TypeVar("B", bound=DecisionBody)


@dataclass(frozen=True)
class DecisionCall:
    """A request, and how its answers are rendered."""

    request: DecisionRequest
    answer: Callable[[Decided], Mapping[str, Any]]  # in a thread


@dataclass(frozen=True)
class DecisionDialect(Generic[B]):
    """One form of a request for decisions, and of its answers and errors."""

    body_type: type[B]
    parse: Callable[[Service, str, B], DecisionCall]  # endpoint; in a thread; raises Refused
    errors: ErrorForm = OPENAI_ERRORS
    state: str = "state"  # the field that holds what the engine calls the state
    listed: bool = False  # questions are a list, and their ids are their numbers
