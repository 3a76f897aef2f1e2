"""How often operations are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sfumato.ops.registry import watched


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of every operation in every thread, not those inside of twins."""
    counter: Counter[str] = Counter()

    def count(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        counter[operation] += 1

    with watched(count):
        yield counter
