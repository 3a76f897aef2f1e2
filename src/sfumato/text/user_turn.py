"""The ids before and after a user's text in a prompt of one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sfumato.text.template import ChatTemplate, TemplateError
from sfumato.text.tokenizer import Tokenizer

_PLACEHOLDER = "\U000f0000"  # a private-use character: untouched by trimming


def user_turn(
    template: ChatTemplate, tokenizer: Tokenizer, thought: str = ""
) -> tuple[list[int], list[int]]:
    """The ids of a prompt up to a user's text, and from its end on to where the model's turn
    begins.

    thought: with markers, what the model's turn begins with when it does not think; it is
    appended where the template knows thinking and does not write it itself.

    Raises TemplateError for a template that does not show a message exactly once.
    """
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    text = template.render(messages)
    head, placeholder, tail = text.partition(_PLACEHOLDER)
    if not placeholder or _PLACEHOLDER in tail:
        raise TemplateError(
            f"{template.origin}: shows a user's message {text.count(_PLACEHOLDER)} times, so that "
            "no question can be put into it; get the template again"
        )
    tail += _missing(template, messages, text, thought)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    head_ids, tail_ids = (
        [token for token in tokenizer.encode(part) if token != tokenizer.bos_id]
        for part in (head, tail)
    )
    return [*first, *head_ids], tail_ids


def empty_thought_ids(template: ChatTemplate, tokenizer: Tokenizer, thought: str) -> list[int]:
    """The ids of what has to follow a prompt for the model not to think: of `thought`, or none
    where the template knows no thinking or writes it itself."""
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    return tokenizer.encode(_missing(template, messages, template.render(messages), thought))


def _missing(
    template: ChatTemplate, messages: Sequence[Mapping[str, str]], text: str, thought: str
) -> str:
    knows_thinking = template.render(messages, thinking=True) != text
    return thought if knows_thinking and not text.endswith(thought) else ""
