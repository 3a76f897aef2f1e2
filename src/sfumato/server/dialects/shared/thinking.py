"""Whether a model thinks before it answers, and for how many tokens."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.refused import Refused
from sfumato.server.schemas.json_schemas import EFFORTS


@dataclass(frozen=True)
class Thinking:
    """What a body says of thinking; None: nothing."""

    effort: str | None = None
    enabled: bool | None = None  # takes precedence over the effort
    most: int | None = None  # tokens; takes precedence over those of the effort
    # The fields, as errors name them.
    effort_field: str = "reasoning_effort"
    enabled_field: str = "chat_template_kwargs"


def thinking_of(given: Thinking, continued: bool = False) -> tuple[bool, int | None]:
    """Whether the model thinks, and for how many tokens at most. continued: whether the reply
    continues a message. Raises Refused."""
    effort, field = given.effort, given.effort_field
    if effort is not None and effort not in EFFORTS:
        raise Refused(field, f"must be one of {', '.join(EFFORTS)}")
    budget = None if effort is None else EFFORTS[effort]
    thinking = given.enabled if given.enabled is not None else effort is not None and budget != 0
    if thinking and continued:
        name = given.enabled_field if effort is None else field
        raise Refused(
            name,
            "an answer that is continued is not thought about first",
            "ask for no thinking, or set continue_final_message to false",
        )
    if given.most is not None:
        budget = given.most
    return bool(thinking), budget if thinking and budget != 0 else given.most
