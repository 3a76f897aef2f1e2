"""`RequestEcho`: what a response repeats of its request, and what is kept of its input.

The body loses its lists and longer texts before the reply is written. The echo lives as long as the
reply is written, so its bytes are bounded here: nothing else counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sfumato.server.response_store import Item

MOST_ECHOED = 2**18  # characters of the tools, and again of the schema
MOST_WAITING = 2**20  # of an input that was cut, and waits for the end of its reply to be kept


@dataclass(frozen=True)
class RequestEcho:
    owner: str
    items: tuple[Item, ...]  # of the body's own input, where the response is kept
    fields: dict[str, Any]  # of the response
    logprobs: bool
    encrypted: bool  # whether thoughts have an encrypted content
    notes: tuple[str, ...]  # for `warnings`


def is_short(values: Iterable[Any], most: int = MOST_ECHOED) -> bool:
    """Whether values of JSON come to at most so many characters."""
    count = 0
    for value in values:
        count += len(json.dumps(value, ensure_ascii=False))
        if count > most:
            return False
    return True


def bounded(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The fields, in which long tools are none and a long schema is an empty one; notes: gets a
    line for each."""
    if not is_short(fields["tools"]):
        fields = fields | {"tools": []}
        notes.append("tools: too long to be repeated in the response")
    text = fields["text"]
    if not is_short([text["format"].get("schema")]):
        fields = fields | {"text": text | {"format": text["format"] | {"schema": {}}}}
        notes.append("text.format.schema: too long to be repeated in the response")
    return fields
