"""Prompts longer than a slot, which llama-server refuses in words that its clients look for.

The routes of other APIs get a larger slot for such a prompt, and so does an infill, whose prefix
llama-server would cut.
"""

from __future__ import annotations

from sfumato.refused import TooLarge
from sfumato.server.http.errors import ApiError
from sfumato.server.service import Service

COMPLETION = "request ({tokens} tokens) exceeds the available context size ({context} tokens)"
EMBEDDING = "input ({tokens} tokens) is too large for a slot ({context} tokens)"


def check_slot(service: Service, tokens: int, words: str, field: str) -> None:
    """Raises ApiError for a prompt of more tokens than a slot that is made at start."""
    if tokens > service.context:
        text = words.format(tokens=tokens, context=service.context)
        message = f"{text}, try increasing it with --context"
        answer = ApiError.of(TooLarge(None, message, "", tokens, service.context))
        answer.param = field
        raise answer
