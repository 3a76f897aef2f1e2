"""vLLM's render routes: what a request's prompt comes to, and nothing is generated.

llm-d's router asks them before it chooses a replica, where it compares prompts by their tokens and
pictures (its producer of precise prefixes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi.responses import Response

from sfumato.engine import Request
from sfumato.server.dialects import openai_chat, openai_completions
from sfumato.server.http.route import Frame, Post, json_response
from sfumato.server.schemas import Body
from sfumato.server.service import Service

B = TypeVar("B", bound=Body)


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


def _chat(service: Service, body: openai_chat.ChatBody) -> Frame:
    """Raises Refused."""
    return _rendered(openai_chat.parse(service, body)[0])


def _completions(service: Service, body: openai_completions.CompletionBody) -> Response:
    """An object for each prompt, whatever the number of replies. Raises Refused."""
    requests = openai_completions.parse(service, body)
    return json_response(map(_rendered, requests[:: body.n or 1]), {})


def _post(
    path: str, name: str, body: type[B], at_once: Callable[[Service, B], Frame | Response]
) -> Post[B]:
    return Post(
        path=f"{path}/render",
        name=name,
        tag="vLLM",
        help="The tokens that the prompt of such a request comes to, and its pictures.",
        body_type=body,
        at_once=at_once,
    )


POSTS: tuple[Post[Any], ...] = (
    _post(openai_chat.PATH, "render_chat", openai_chat.ChatBody, _chat),
    _post(
        openai_completions.PATH,
        "render_completions",
        openai_completions.CompletionBody,
        _completions,
    ),
)
