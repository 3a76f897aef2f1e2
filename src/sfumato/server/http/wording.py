"""The names of fields in a body, where the engine's messages have others. Knows no dialect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sfumato.server.http.errors import ApiError

Wording = tuple[tuple[str, str], ...]
"""Pairs of a regular expression, which matches the beginning of a message of the engine or a
shared check, and what stands there in the body's words."""


def reword(error: ApiError, wording: Wording) -> None:
    """Gives an error the names of the body's fields."""
    for engines, bodys in wording:
        pattern = rf"{engines}(?![A-Za-z_])"
        if re.match(pattern, error.message):
            error.message = re.sub(pattern, bodys, error.message, count=1)
            if error.param is not None:
                error.param = re.sub(f"^{pattern}", bodys, error.param, count=1)
            return


@contextmanager
def in_the_words_of(wording: Wording) -> Iterator[None]:
    """The same for an ApiError that is raised within."""
    try:
        yield
    except ApiError as error:
        reword(error, wording)
        raise
