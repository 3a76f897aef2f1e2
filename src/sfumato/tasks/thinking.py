"""The thinking budget: where a thought is ended so that an answer has room. Knows no texts: what a
thought is, the markers among the ids say, as they do to the parser of replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sfumato.text.markers import ChatMarkers
from sfumato.text.reply import Region
from sfumato.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ThinkingBudget:
    """How many tokens of a reply may be thought, and the markers between which thoughts stand."""

    format: ChatMarkers
    markers: Mapping[int, str]  # the special tokens, by id
    closes: int | None  # the one that ends a thought; None: this tokenizer knows no thoughts
    header: tuple[int, ...]  # names the channel; no part of the thought
    tokens: int
    strict: bool  # the request sets it, so that a thought that ended by itself is cut too
    ignore_ends: bool  # end markers end no thought

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        format: ChatMarkers,
        requested: int | None,
        max_tokens: int,
        canvas_length: int,
        ignore_ends: bool,
    ) -> ThinkingBudget:
        """requested: the request's own limit. In any case min(canvas, max_tokens // 2) tokens are
        left for the answer; None shortens only a thought that would take them."""
        header = tuple(tokenizer.encode(format.thought_header, special=False))
        answer, around = min(canvas_length, max_tokens // 2), 2 + len(header)
        room = max(0, max_tokens - answer - around)
        tokens = room if requested is None else min(requested, room)
        markers = {token: tokenizer.token_text(token) for token in tokenizer.special_ids}
        closes = tokenizer.token_id(format.thought_close)
        return cls(format, markers, closes, header, tokens, requested is not None, ignore_ends)

    def cut(self, reply: list[int], added: list[int]) -> int | None:
        """How many tokens of a settled canvas are kept before its thought is closed; None where
        the canvas stays as it is."""
        if self.closes is None:
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
        """For each thought the place after its opening marker, where its tokens stand, without
        markers and header, and whether it ended."""
        tokens, region, opened = tuple(ids), Region.ANSWER, 0
        for place, token in enumerate(tokens):
            marker = self.markers.get(token)
            begun = None
            if marker is not None:
                begun = region.begun_by(marker, self.format, self.ignore_ends)
            if begun is not None:
                if region is Region.THOUGHT:
                    yield opened, range(self._begin(tokens, opened), place), True
                region, opened = begun, place + 1
        if region is Region.THOUGHT:
            yield opened, range(self._begin(tokens, opened), len(tokens)), False

    def _begin(self, ids: tuple[int, ...], opened: int) -> int:
        """Where a thought begins, its header passed."""
        written = ids[opened : opened + len(self.header)]
        return opened + len(written) if written == self.header[: len(written)] else opened
