"""Where later prompts will part from this one: the lengths at which slots should be marked.

A conversation's next prompt repeats this one up to some place near its end: templates may close
a prompt with words that its history does not show (an empty thought, where thinking is off), and
leave thoughts out of history. Another conversation repeats the system prompt. Nothing is assumed
of templates: prompts that differ in the right places are rendered and compared. Knows no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def reusable_lengths(
    prompt_ids: Callable[[Messages], list[int]], messages: Messages, ids: Sequence[int]
) -> tuple[int, ...]:
    """The lengths of `ids` that later prompts are likely to share, in increasing order.

    prompt_ids makes the token ids of messages, with the request's tools and settings; `ids` are
    those of `messages`. Where a template refuses what is made up here, the prompt's own end.
    """
    try:
        told = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
        found = {common(ids, prompt_ids([*messages, *told]))}
        if len(messages) > 1 and messages[0].get("role") in ("system", "developer"):
            # Of two texts that begin differently, one does not begin as this prompt's does.
            others = ([messages[0], {"role": "user", "content": text}] for text in "xy")
            found.add(min(common(ids, prompt_ids(other)) for other in others))
    except ValueError:
        return (len(ids),)
    return tuple(sorted(found - {0}))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
