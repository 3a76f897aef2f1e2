"""Text between a prompt and a suffix, as a hole of the engine's request."""

from __future__ import annotations

from typing import Any

from sfumato.diffusion.constraints.hole import Hole
from sfumato.engine import Request
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.http.errors import bad_request, from_value_error
from sfumato.server.schemas.generation import Sampling
from sfumato.server.service import Service

_OF_REPLIES = {
    "min_tokens": 0,
    "ignore_eos": False,
    "settle_at_end": False,
    "max_thinking_tokens": None,
}


def insertion(
    service: Service, body: Sampling, suffix: str, limit: int | None, field: str, endpoint: str
) -> dict[str, Any]:
    """Fields of a Request. limit: tokens of the hole at most; None and -1: what the canvas leaves
    beside the suffix, or half of it where the suffix is longer. field: the suffix's name. Raises
    ApiError."""
    for name, neutral in _OF_REPLIES.items():
        if getattr(body, name) not in (None, neutral):
            raise bad_request(
                f"{name}: text before a suffix ends where the suffix begins; leave the field out",
                name,
            )
    if grammar_of(body) is not None:
        raise bad_request(
            f"{field}: does not go together with a schema or grammar; leave one of them out", field
        )
    request = Request(suffix, endpoint=endpoint)
    try:
        with service.engine.refusals(request):
            tokens = len(service.encode(suffix, field, special=False))
    except ValueError as error:
        raise from_value_error(error, request) from None
    longest = body.canvas_length or service.model.config.canvas_length
    room = longest - 1 - min(tokens, longest // 2)  # the token before the hole is on the canvas too
    if room < 1:
        raise bad_request(
            f"canvas_length: a canvas of {longest} has no room for text before a suffix; ask for 3 "
            "or more",
            "canvas_length",
        )
    most = room if limit in (None, -1) else min(limit or 1, room)
    return {"parts": (Hole(at_most=most), suffix), "max_tokens": most}
