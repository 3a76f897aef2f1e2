"""What a hole is tried with: lengths from coarse to fine, or choices one after another.

Knows scores, and not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.fill_plan import Filling
from sfumato.diffusion.constraints.hole import Hole
from sfumato.options.limits import TRIALS


@dataclass(frozen=True)
class Tried:
    """What a hole was filled with, and its score: the causal log-likelihood, in nats, of these
    tokens and of the text that follows them."""

    ids: tuple[int, ...]
    score: float


class HoleSearch:
    """Finds the filling of one hole with the highest score.

    Choices are all tried. Of lengths, a few between 1 and the greatest are tried first, evenly by
    ratio, and then those between the neighbours of the best one, until these are tried too.
    """

    def __init__(self, hole: Hole, choices: Sequence[tuple[int, ...]]) -> None:
        """choices: the hole's, as tokens."""
        self._is_length = hole.at_most is not None
        self._queue: list[Filling] = list(choices)
        if hole.at_most is not None:
            self._queue = [*first_lengths(hole.at_most)]
        self.is_decided = len(self._queue) == 1  # before any score
        self.best = self._queue[0]
        self._best_score = float("-inf")
        self._lengths: set[int] = set()  # that were tried
        self.tried: list[Tried] = []

    def next(self) -> list[Filling]:
        """The next fillings to try, at most TRIALS; none where the best is known."""
        if not self._queue and self._is_length:
            assert isinstance(self.best, int)
            self._queue = [*lengths_beside(self.best, self._lengths)]
        now, self._queue = self._queue[:TRIALS], self._queue[TRIALS:]
        return now

    def scored(self, filling: Filling, tried: Tried) -> None:
        """Of equal scores, the filling that was tried first is the better one."""
        self.tried.append(tried)
        if isinstance(filling, int):
            self._lengths.add(filling)
        if tried.score > self._best_score:
            self.best, self._best_score = filling, tried.score


def first_lengths(most: int) -> list[int]:
    """At most TRIALS lengths from 1 to `most`, both among them."""
    if most <= TRIALS:
        return list(range(1, most + 1))
    return sorted({round(most ** (step / (TRIALS - 1))) for step in range(TRIALS)})


def lengths_beside(best: int, tried: set[int]) -> list[int]:
    """At most TRIALS lengths, evenly among those between the neighbours of `best` that were tried;
    none where the neighbours are next to it."""
    below = max((length for length in tried if length < best), default=best - 1)
    above = min((length for length in tried if length > best), default=best + 1)
    between = [length for length in range(below + 1, above) if length != best]
    if len(between) <= TRIALS:
        return between
    last = len(between) - 1
    return [between[round(step * last / (TRIALS - 1))] for step in range(TRIALS)]
