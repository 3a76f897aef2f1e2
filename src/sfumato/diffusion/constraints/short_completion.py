"""A short way to close what a grammar has open, for a reply whose tokens are running out.

The search is bounded: some walks that prefer what closes a text, and choose the rest by a rule of
their own.  What it does not find there may still be.
"""

from __future__ import annotations

from sfumato.diffusion.constraints.grammar import GrammarState
from sfumato.diffusion.constraints.grammar_reply import Constraint, GrammarReply

WALKS = 6
TEXT_WALKS = 2  # the first of them, which write each letter of a text once
MOST_TOKENS = 256
"""Of one walk."""
MOST_CHOICES = 512
"""Of one search: some tens of milliseconds."""
_CANDIDATES = 64  # tokens among which a walk chooses where no closer may follow


class ShortCompletion:
    """Finds completions for one constraint."""

    def __init__(self, constraint: Constraint) -> None:
        tokens = constraint.grammar.tokens
        self._special, self._closers = constraint.quote, tokens.closers
        self._inside, self._quote = tokens.text_closers
        self._of_texts, self._separators = tokens.of_texts, tokens.separators
        self._most = self._left = 0  # choices of the search under way

    @property
    def used(self) -> int:
        """Choices that the last search took."""
        return self._most - max(0, self._left)

    def find(self, reply: GrammarReply, room: int, choices: int = MOST_CHOICES) -> list[int] | None:
        """At most `room` tokens after which the reply may end; None where no walk of so many
        choices in all finds any. The reply stays as it is."""
        self._most = self._left = choices
        if reply.thinks:  # an open thought is as long as it will be
            return None
        for walk in range(WALKS):
            completion = self._walk(reply.answer_state(), min(room, MOST_TOKENS), walk)
            if completion is not None or self._left <= 0:
                return completion
        return None

    def _walk(self, state: GrammarState, room: int, walk: int) -> list[int] | None:
        written: list[int] = []
        used: set[int] = set()  # of the text that is open
        while not state.accepts:
            step = state.forced()
            if not step:
                token = self._choose(state, len(written), walk, used)
                if token is None:
                    return None
                step = [token]
            if len(written) + len(step) > room:
                return None
            state.take(step)
            written += step
        return written

    def _choose(self, state: GrammarState, place: int, walk: int, used: set[int]) -> int | None:
        self._left -= 1
        if self._left < 0:
            return None
        bits = state.bits()

        def may(token: int | None) -> bool:
            return token is not None and bool(bits[token >> 3] >> (token & 7) & 1)

        if may(self._special):
            return self._special
        is_open = may(self._inside) or all(map(may, self._of_texts))
        if is_open and may(self._quote):
            used.clear()
            return self._quote  # a bracket would go on with the text
        if is_open and walk < TEXT_WALKS:
            chosen = next((t for t in self._separators if t not in used and may(t)), None)
            if chosen is None:
                some = state.mask(bits).nonzero()[:, 0]
                some = some[:: max(1, len(some) // MOST_CHOICES)]
                chosen = next((token for token in some.tolist() if token not in used), None)
            if chosen is not None:
                used.add(chosen)
                return chosen
        closers = self._closers if walk % 2 == 0 else self._closers[:4]
        chosen = next((token for token in closers if may(token)), None)
        if chosen is not None:
            return chosen
        allowed = state.mask(bits).nonzero()[:, 0]
        stride = max(1, len(allowed) // _CANDIDATES)
        candidates = allowed[::stride].tolist()
        # Another choice at each place and in each walk: a loop is left after a few rounds.
        return candidates[(place * 7 + walk * 13) % len(candidates)] if candidates else None
