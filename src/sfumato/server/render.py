"""vLLM's render routes: what a request's prompt comes to, and nothing is generated.

llm-d's router asks them before it chooses a replica, where it compares prompts by their tokens and
pictures (its producer of precise prefixes)."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi.responses import Response

from sfumato.engine import Request
from sfumato.server.dialects.openai_chat import OPENAI_CHAT
from sfumato.server.dialects.openai_completions import OPENAI_COMPLETIONS
from sfumato.server.http.route import Dialect, Frame, Post, json_response
from sfumato.server.service import Service


def _rendered(request: Request) -> Frame:
    """The tokens of a prompt; its pictures by their hashes, and where their soft tokens stand."""
    assert request.made is not None
    pictures, features = request.made.pictures, None
    if pictures:
        features = {
            "mm_hashes": {"image": [each.patches.key for each in pictures]},
            "mm_placeholders": {
                "image": [{"offset": p.start, "length": p.end - p.start} for p in pictures]
            },
        }
    return {"request_id": request.id, "token_ids": request.made.ids, "features": features}


def _answer(dialect: Dialect[Any], service: Service, body: Any) -> Frame | Response:
    """An object for a chat; for completions an array with one for each prompt, whatever the number
    of replies. Raises Refused."""
    requests = dialect.parse(service, body)
    if dialect is OPENAI_CHAT:
        return _rendered(requests[0])
    return json_response(map(_rendered, requests[:: body.n or 1]), {})


POSTS: tuple[Post[Any], ...] = tuple(
    Post(
        path=f"{dialect.path}/render",
        name=f"render_{dialect.name}",
        tag="vLLM",
        help="The tokens that the prompt of such a request comes to, and its pictures.",
        body_type=dialect.body_type,
        at_once=partial(_answer, dialect),
    )
    for dialect in (OPENAI_CHAT, OPENAI_COMPLETIONS)
)
