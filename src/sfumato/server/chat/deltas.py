"""Replies as deltas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Request, Settled
from sfumato.engine.stats import RowState
from sfumato.server.service import Service
from sfumato.text.reply import ToolCall

# One word, with the space before it; what is very long, or has no spaces, is cut.
_PIECE = re.compile(r"\s?\S{1,24}|\s{1,24}")


def pieces(text: str) -> list[str]:
    """The text cut between words; joined, the pieces are the text."""
    return _PIECE.findall(text)


Growth = tuple[str, str, Sequence[ToolCall]]
"""Of a reply: thought, answer and complete calls."""


class Unsent:
    """Counts what the canvases of a reply have brought, so that its end brings the rest."""

    def __init__(self) -> None:
        self._thought = self._text = self._calls = 0  # characters, and calls

    def of(self, settled: Settled) -> Growth:
        """What a canvas brings."""
        self._thought += len(settled.thought)
        self._text += len(settled.text)
        self._calls += len(settled.tool_calls)
        return settled.thought, settled.text, settled.tool_calls

    def rest(self, reply: Reply) -> Growth:
        """What no canvas has brought."""
        thought = (reply.thought or "")[self._thought :]
        return thought, reply.text[self._text :], reply.tool_calls[self._calls :]


WATCH_S = 0.1  # how often the engine's state is looked at
Progress = tuple[int, dict[str, Any]]
"""A reply's number, and the progress of its prompt."""


class PromptProgress:
    """The prompts of one HTTP request. The first progress of each says what a slot held already,
    and the last one that all is encoded."""

    def __init__(self, service: Service, requests: Sequence[Request], is_wanted: bool) -> None:
        self._engine = service.engine
        self._numbers = {request.id: number for number, request in enumerate(requests)}
        # Tokens that were reported, of prompts that are not complete; None: none yet.
        self._open: dict[int, int | None] = dict.fromkeys(range(len(requests)) if is_wanted else ())

    @property
    def watches_s(self) -> float | None:
        """How often there may be something new; None where nothing more is wanted."""
        return WATCH_S if self._open else None

    def news(self) -> Iterator[Progress]:
        """What has been encoded since the last time."""
        if not self._open:
            return
        for row in self._engine.state().running:
            number = self._numbers.get(row.id)
            if number is not None and number in self._open:
                yield from self._of(number, row)

    def rest(self, number: int, account: Account | None = None) -> Iterator[Progress]:
        """Before a reply's first text, or, with its account, at its end."""
        if number not in self._open:
            return
        yield from (each for each in self.news() if each[0] == number)
        if account is not None and number in self._open:
            total, cache = account.prompt_tokens, account.cached_tokens
            yield from self._steps(number, total, cache, total, 1e3 * account.prefill_s)

    def _of(self, number: int, row: RowState) -> Iterator[Progress]:
        age_ms = 1e3 * row.age_s
        return self._steps(number, row.prompt_tokens, row.cached_tokens, row.encoded_tokens, age_ms)

    def _steps(
        self, number: int, total: int, cache: int, processed: int, time_ms: float
    ) -> Iterator[Progress]:
        """From what was reported last; of a prompt that begins, what a slot held of it, first."""
        reported = self._open[number]
        counts = [cache, processed] if reported is None else [processed]
        for count in counts:
            if reported is None or count > reported:
                reported = count
                fields = {"total": total, "cache": cache, "processed": count, "time_ms": time_ms}
                yield number, fields
        self._open[number] = reported
        if reported is not None and reported >= total:
            del self._open[number]
