"""A short way to close what a grammar has open, for a reply whose tokens are running out.

The search is bounded: some walks that prefer what closes a text, and choose the rest by a rule of
their own.  What it does not find there may still be.
"""

from __future__ import annotations

from torch import Tensor

from sfumato.diffusion.constraints.grammar_reply import Constraint, GrammarReply

WALKS = 6
MOST_TOKENS = 512
"""Of one walk."""
_CANDIDATES = 64  # tokens among which a walk chooses where no closer may follow


class ShortCompletion:
    """Finds completions for one constraint."""

    def __init__(self, constraint: Constraint) -> None:
        tokens = constraint.grammar.tokens
        self._special, self._closers = constraint.quote, tokens.closers
        self._inside, self._quote = tokens.text_closers

    def find(self, state: GrammarReply, room: int) -> list[int] | None:
        """At most `room` tokens after which the reply may end; None where no walk finds any. The
        state stays as it is."""
        if state.thinks:  # an open thought is as long as it will be
            return None
        for walk in range(WALKS):
            completion = self._walk(state.without_thought(), min(room, MOST_TOKENS), walk)
            if completion is not None:
                return completion
        return None

    def _walk(self, state: GrammarReply, room: int, walk: int) -> list[int] | None:
        written: list[int] = []
        while not state.accepts:
            following = state.following()
            step = following.forced
            if not step:
                token = self._choose(following.mask, len(written), walk)
                if token is None:
                    return None
                step = [token]
            if len(written) + len(step) > room:
                return None
            state.take(step)
            written += step
        return written

    def _choose(self, mask: Tensor, place: int, walk: int) -> int | None:
        if self._special is not None and mask[self._special]:
            return self._special
        is_text = self._inside is not None and bool(mask[self._inside])
        if is_text and self._quote is not None and mask[self._quote]:
            return self._quote  # a bracket would go on with the text
        for token in self._closers if walk % 2 == 0 else self._closers[:4]:
            if mask[token]:
                return token
        allowed = mask.nonzero()[:, 0]
        if not len(allowed):
            return None
        stride = max(1, len(allowed) // _CANDIDATES)
        candidates = allowed[::stride].tolist()
        # Another choice at each place and in each walk: a loop is left after a few rounds.
        chosen: int = candidates[(place * 7 + walk * 13) % len(candidates)]
        return chosen
