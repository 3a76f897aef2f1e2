"""`RequestEcho`: what a response repeats of its request, and what is kept of its input.

The body loses its lists and longer texts before the reply is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.server.response_store import Item


@dataclass(frozen=True)
class RequestEcho:
    owner: str
    items: tuple[Item, ...]  # of the body's own input, where the response is kept
    fields: dict[str, Any]  # of the response
    logprobs: bool
    encrypted: bool  # whether thoughts have an encrypted content
    notes: tuple[str, ...]  # for `warnings`
