"""Where later prompts will differ from this one: the lengths at which slots should be marked.

A conversation's next prompt repeats this one up to some place near its end: templates may close
a prompt with words that its history does not show (an empty thought, where thinking is off), and
leave thoughts out of history. Another conversation repeats the system prompt. Nothing is assumed
of templates: tiny conversations that differ in the right places are rendered and compared, once
for each kind of prompt, so that a request's own prompt is rendered once. Knows no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
PromptIds = Callable[[Messages, bool], list[int]]
"""Messages, and whether the model is to think → the prompt's token ids; ValueError where the
template refuses them."""

STRIDE = 1024

_USER = {"role": "user", "content": "x"}
_CALL = {"id": "x", "type": "function", "function": {"name": "x", "arguments": "{}"}}
_ENDS: dict[str, Messages] = {  # the smallest conversations whose last message has that role
    "user": [_USER],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "x", "content": "x"},
    ],
}
_NEXT: Messages = [{"role": "assistant", "content": "x"}, _USER]


class SnapshotPoints:
    """What one template writes at the end of prompts and after a system prompt."""

    def __init__(self, prompt_ids: PromptIds, special: Collection[int]) -> None:
        """special: ids that only the template writes, whatever the messages say."""
        self._prompt_ids, self._special = prompt_ids, frozenset(special)
        self._tails: dict[tuple[str, bool], list[int] | None] = {}
        self._gaps: dict[bool, tuple[int, list[int]]] = {}
        for thinking in (False, True):  # now, rather than in the first request
            self._tail("user", thinking)
            self._gap(thinking)

    def lengths(self, ids: Sequence[int], messages: Messages, thinking: bool) -> tuple[int, ...]:
        """The lengths of `ids`, the prompt that `messages` came to, that later prompts are likely
        to share, in increasing order; where the template is not understood, the prompt's end."""
        tail = self._tail(str(messages[-1].get("role")), thinking)
        if tail is None or list(ids[len(ids) - len(tail) :]) != tail:
            return (len(ids),)
        lengths = {len(ids) - len(tail)}
        if len(messages) > 1 and messages[0].get("role") in ("system", "developer"):
            lengths.add(self._after_system(ids, thinking))
        return tuple(sorted(lengths - {0}))

    def _after_system(self, ids: Sequence[int], thinking: bool) -> int:
        """How many ids come before the first message after the system prompt; 0: unknown."""
        start, gap = self._gap(thinking)
        if not gap:
            return 0
        try:
            at = list(ids).index(gap[0], start)
        except ValueError:
            return 0
        return at + common(ids[at : at + len(gap)], gap)

    def _tail(self, role: str, thinking: bool) -> list[int] | None:
        """The end of a prompt that the next one does not repeat; None where it is unknown."""
        if role not in _ENDS:
            return None
        if (role, thinking) not in self._tails:
            self._tails[role, thinking] = self._learnt_tail(_ENDS[role], thinking)
        return self._tails[role, thinking]

    def _learnt_tail(self, messages: Messages, thinking: bool) -> list[int] | None:
        try:
            ids = self._prompt_ids(messages, thinking)
            return ids[common(ids, self._prompt_ids([*messages, *_NEXT], thinking)) :]
        except ValueError:
            return None

    def _gap(self, thinking: bool) -> tuple[int, list[int]]:
        """Where a system prompt's text begins, and what stands between it and the next message's,
        from the first special id on: that one ends the text, which cannot hold it."""
        if thinking not in self._gaps:
            self._gaps[thinking] = self._learnt_gap(thinking)
        return self._gaps[thinking]

    def _learnt_gap(self, thinking: bool) -> tuple[int, list[int]]:
        def ids_of(system: str, user: str) -> list[int]:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            return self._prompt_ids(messages, thinking)

        try:
            ids = ids_of("x", "x")
            start, end = common(ids, ids_of("y", "x")), common(ids, ids_of("x", "y"))
        except ValueError:
            return 0, []
        specials = (at for at in range(start, end) if ids[at] in self._special)
        return start, ids[next(specials, end) : end]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    start, end = 0, min(len(a), len(b))
    while start < end and a[start : start + STRIDE] == b[start : start + STRIDE]:
        start += STRIDE  # slices compare much faster than their items one by one
    pairs = enumerate(zip(a[start : start + STRIDE], b[start : start + STRIDE], strict=False))
    return next((start + i for i, (x, y) in pairs if x != y), end)
