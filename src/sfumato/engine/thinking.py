"""The thinking budget: where a thought is ended so that an answer has room. Knows ids only."""

from __future__ import annotations

from collections.abc import Iterable
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
        """asked: by the request; None leaves min(canvas, max_tokens // 2) tokens for the answer,
        and touches only a thought that would take them."""
        answer, markers = min(canvas_length, max_tokens // 2), 2
        tokens = max(0, max_tokens - answer - markers) if asked is None else asked
        opens, closes = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
        return cls(opens, closes, tokens, asked is not None)

    def cut(self, reply: list[int], added: list[int]) -> int | None:
        """How many tokens of a settled canvas are kept before its thought is closed; None where
        the canvas stays as it is."""
        if self.opens is None or self.closes is None:
            return None
        inside, count, over = False, 0, None
        for place, token in enumerate((*reply, *added)):
            if token == self.closes:
                inside = False
                over = over if self.strict else None
            elif inside:
                count += 1
                over = place if over is None and count > self.tokens else over
            else:
                inside = token == self.opens
        return None if over is None else max(0, over - len(reply))

    def count(self, ids: Iterable[int]) -> int:
        """The tokens of a reply that are thought, without the markers."""
        inside, count = False, 0
        for token in ids:
            if token == self.closes:
                inside = False
            elif inside:
                count += 1
            else:
                inside = token == self.opens
        return count
