"""A text that a reply is expected to resemble: what the reply's canvases begin as.

A share of the positions begins as noise all the same, and no position is pinned, so that every
token may still change. Knows ids, and not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.diffusion.checks import is_number
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import Never
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.options.limits import STRENGTH
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

LEAST_STEPS = 2  # in which a canvas can settle
BLOCK = 2**12  # tokens that are compared at a time: the comparison is quadratic in them
_TAIL = 8  # tokens of a reply that its place in the prediction is looked for with
_REACH = 1024  # tokens of the prediction before and after the length of the reply that are searched


@dataclass(frozen=True)
class PredictedText:
    """A prediction as a caller gives it. strength: the share of the positions of each canvas that
    begins as noise; at 0 the canvas begins as the text, at 1 as it would without."""

    text: str
    strength: float = STRENGTH

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise Refused("prediction", f"must be text, got {quoted(self.text)}")
        if not (is_number(self.strength) and 0 <= self.strength <= 1):
            raise Refused("strength", f"must be from 0 to 1, got {quoted(self.strength)}")


@dataclass(frozen=True)
class Prediction:
    """A prediction as tokens."""

    opening: tuple[int, ...]  # what the reply begins with before the text
    ids: tuple[int, ...]  # of the text
    closing: tuple[
        int, ...
    ]  # the token that ends a reply, and the one that fills the canvas; or none
    strength: float

    def start(self, reply: Sequence[int], length: int, noise: Noise) -> tuple[int, ...] | None:
        """What the next canvas begins as, -1 where that is noise; None where the prediction says
        nothing of it. reply: the tokens before the canvas; noise: the canvas's."""
        complete = (*self.opening, *self.ids, *self.closing[:1])
        place = place_of(reply, complete)
        tokens = complete[place : place + length]
        if not tokens:
            return None
        filler = self.closing[1] if self.closing else -1
        tokens = (*tokens, *[filler] * (length - len(tokens)))
        # Step 0 draws no token, so that its uniforms are free.
        drawn = noise.uniforms(0, length).tolist()
        return tuple(-1 if u < self.strength else t for t, u in zip(tokens, drawn, strict=True))

    def accepted(self, reply: Sequence[int]) -> int:
        """How many tokens of the text stand in a reply, in the same order: the longest common
        subsequence, of each BLOCK tokens by themselves."""
        blocks = range(0, len(self.ids), BLOCK)
        return sum(
            common_length(self.ids[at : at + BLOCK], reply[at : at + BLOCK]) for at in blocks
        )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common subsequence, by one addition of len(one) bits for each token
    of the other (Hyyrö, "Bit-parallel LCS-length computation revisited", AWOCA 2004)."""
    places: dict[int, int] = {}
    for place, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full
    for token in other:
        matches = row & places.get(token, 0)
        row = (row + matches | row - matches) & full
    return len(one) - row.bit_count()


def predicted_steps(config: SamplerConfig) -> int:
    """Steps of a canvas that begins as a prediction, at most: a right one settles in a few, and
    what has not settled by then is drawn again from noise. config: complete."""
    assert config.max_steps
    if isinstance(config.stopping, Never):
        return config.max_steps
    return min(config.max_steps, max(LEAST_STEPS, config.max_steps // 8))


def place_of(reply: Sequence[int], prediction: Sequence[int]) -> int:
    """Where a prediction goes on after a reply: behind the last tokens of the reply, where the
    prediction has them, and of several such places the one nearest to the length of the reply; else
    at that length."""
    expected = len(reply)
    tail = tuple(reply[-_TAIL:])
    if not tail:
        return 0
    low, high = expected - len(tail) - _REACH, min(expected + _REACH, len(prediction) - len(tail))
    starts = range(max(0, low), high + 1)
    ends = [at + len(tail) for at in starts if tuple(prediction[at : at + len(tail)]) == tail]
    return min(ends, key=lambda end: abs(end - expected), default=expected)
