"""Text between a prompt and a suffix, as a hole of the engine's request."""

from __future__ import annotations

from typing import Any

from sfumato.diffusion.constraints.hole import Hole
from sfumato.engine import Request
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.dialects.shared.grammars import grammar_of
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
    Refused."""
    given = {name: getattr(body, name) not in (None, no) for name, no in _OF_REPLIES.items()}
    given |= {"suffix": True, "grammar": grammar_of(body) is not None}
    if (refused := exclusions.refusal(exclusions.SUFFIX, given)) is not None:
        raise refused.renamed({"suffix": field})
    request = Request(suffix, endpoint=endpoint)
    with service.engine.refusals(request):
        tokens = len(service.encode(suffix, field, special=False))
    longest = body.canvas_length or service.model.config.canvas_length
    room = longest - 1 - min(tokens, longest // 2)  # the token before the hole is on the canvas too
    if room < 1:
        raise Refused(
            "canvas_length",
            f"a canvas of {longest} has no room for text before a suffix",
            "ask for 3 or more",
        )
    most = room if limit in (None, -1) else min(limit or 1, room)
    return {"parts": (Hole(at_most=most), suffix), "max_tokens": most}
