"""The thinking budget: where a thought is ended so that an answer has room. Knows ids only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sfumato.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ThinkingBudget:
    """How many tokens of a reply may be thought, and the markers between which thoughts stand."""

    opens: int | None  # None: this tokenizer knows no thoughts
    closes: int | None
    tokens: int
    strict: bool  # asked for, so that a thought that ended by itself is cut too

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, asked: int | None, max_tokens: int, canvas_length: int
    ) -> ThinkingBudget:
        """asked: by the request. Whatever it is, min(canvas, max_tokens // 2) tokens are left for
        the answer; None touches only a thought that would take them."""
        answer, markers = min(canvas_length, max_tokens // 2), 2
        room = max(0, max_tokens - answer - markers)
        tokens = room if asked is None else min(asked, room)
        opens, closes = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
        return cls(opens, closes, tokens, asked is not None)

    def cut(self, reply: list[int], added: list[int]) -> int | None:
        """How many tokens of a settled canvas are kept before its thought is closed; None where
        the canvas stays as it is."""
        if self.opens is None or self.closes is None:
            return None
        left = self.tokens
        for places, ended in self._thoughts((*reply, *added)):
            if len(places) > left and (self.strict or not ended):
                return max(0, places[left] - len(reply))
            left = max(0, left - len(places))
        return None

    def count(self, ids: Iterable[int]) -> int:
        """The tokens of a reply that are thought, without the markers."""
        return sum(len(places) for places, _ in self._thoughts(ids))

    def _thoughts(self, ids: Iterable[int]) -> Iterator[tuple[range, bool]]:
        """Where the tokens of each thought stand, without the markers, and whether it ended."""
        start, end = None, 0
        for place, token in enumerate(ids):
            end = place + 1
            if start is None:
                start = end if token == self.opens else None
            elif token == self.closes:
                yield range(start, place), True
                start = None
        if start is not None:
            yield range(start, end), False
