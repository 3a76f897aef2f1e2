"""Whether a chat's model thinks before it answers, and for how many tokens."""

from __future__ import annotations

from sfumato.server.http.errors import bad_request
from sfumato.server.schemas.json_schemas import EFFORTS
from sfumato.server.schemas.openai import ChatBody


def thinking_of(body: ChatBody, continued: bool) -> tuple[bool, int | None]:
    """Whether the model thinks, and for how many tokens at most. continued: whether the reply
    continues a message. Raises ApiError."""
    effort = body.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort: must be one of {', '.join(EFFORTS)}", "reasoning_effort"
        )
    budget = None if effort is None else EFFORTS[effort]
    enabled = body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking
    thinking = enabled if enabled is not None else effort is not None and budget != 0
    if thinking and continued:
        name = "chat_template_kwargs" if effort is None else "reasoning_effort"
        raise bad_request(
            f"{name}: an answer that is continued is not thought about first; ask for no thinking, "
            "or set continue_final_message to false",
            name,
        )
    if body.max_thinking_tokens is not None:
        budget = body.max_thinking_tokens
    return bool(thinking), budget if thinking and budget != 0 else body.max_thinking_tokens
