"""The thinking budget: where a thought is ended so that an answer has room. Knows ids only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sfumato.text.tokenizer import Tokenizer

HEADER = "thought\n"  # what a thought's channel begins with


@dataclass(frozen=True)
class ThinkingBudget:
    """How many tokens of a reply may be thought, and the markers between which thoughts stand."""

    opens: int | None  # None: this tokenizer knows no thoughts
    closes: int | None
    header: tuple[int, ...]  # names the channel; no part of the thought
    tokens: int
    strict: bool  # asked for, so that a thought that ended by itself is cut too

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, asked: int | None, max_tokens: int, canvas_length: int
    ) -> ThinkingBudget:
        """asked: by the request. Whatever it is, min(canvas, max_tokens // 2) tokens are left for
        the answer; None touches only a thought that would take them."""
        header = tuple(tokenizer.encode(HEADER, special=False))
        answer, markers = min(canvas_length, max_tokens // 2), 2 + len(header)
        room = max(0, max_tokens - answer - markers)
        tokens = room if asked is None else min(asked, room)
        opens, closes = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
        return cls(opens, closes, header, tokens, asked is not None)

    def cut(self, reply: list[int], added: list[int]) -> int | None:
        """How many tokens of a settled canvas are kept before its thought is closed; None where
        the canvas stays as it is."""
        if self.opens is None or self.closes is None:
            return None
        left = self.tokens
        for opened, places, ended in self._thoughts((*reply, *added)):
            if not left:  # then the header goes too: there may be no room for it
                places = range(opened, places.stop)
            if len(places) > left and (self.strict or not ended):
                return max(0, places[left] - len(reply))
            left = max(0, left - len(places))
        return None

    def count(self, ids: Iterable[int]) -> int:
        """The tokens of a reply that are thought, without markers and header."""
        return sum(len(places) for _, places, _ in self._thoughts(ids))

    def _thoughts(self, ids: Iterable[int]) -> Iterator[tuple[int, range, bool]]:
        """Of each thought: the place after its opening marker, where its tokens stand, without
        markers and header, and whether it ended."""
        whole, opened = tuple(ids), None
        for place, token in enumerate(whole):
            if opened is None:
                opened = place + 1 if token == self.opens else None
            elif token == self.closes:
                yield opened, range(self._begin(whole, opened), place), True
                opened = None
        if opened is not None:
            yield opened, range(self._begin(whole, opened), len(whole)), False

    def _begin(self, ids: tuple[int, ...], opened: int) -> int:
        """Where a thought begins, its header passed."""
        written = ids[opened : opened + len(self.header)]
        return opened + len(written) if written == self.header[: len(written)] else opened
