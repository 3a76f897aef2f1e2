"""A text whose holes have been filled, as its caller reads it. Knows how ids are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sfumato.diffusion.constraints.hole import Hole, Part
from sfumato.diffusion.constraints.hole_search import Tried
from sfumato.diffusion.limits import Stats

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class FillOutcome:
    """What the holes of a text were filled with, as ids."""

    holes: tuple[list[int], ...]
    # Of each hole, the most probable tokens of the step that settled it, and their probabilities:
    # int64 and float32 [tokens, top]; None where no position of the canvas was open.
    top: tuple[tuple[Tensor, Tensor] | None, ...]
    tried: tuple[tuple[Tried, ...], ...]  # of each hole; none where nothing was scored
    stats: Stats
    warnings: tuple[str, ...]
    cancelled: bool = False  # no hole is filled then


@dataclass(frozen=True)
class Alternative:
    """One of the ways in which a hole was filled.

    score: the causal log-likelihood, in nats, of the hole and of the text that follows it, up to
    the next hole that was not decided yet. probability: softmax of the scores of all alternatives.
    """

    text: str
    tokens: int
    score: float
    probability: float


@dataclass(frozen=True)
class FilledHole:
    """What a hole was filled with.

    probability: of a choice, that among the choices; else the product of `probabilities`, which are
    of each token in the denoising step that settled it, at that step's temperature. alternatives:
    the lengths or choices that were tried, in that order; empty where there was one.
    """

    text: str
    token_ids: list[int]
    probability: float
    probabilities: list[float]  # of a choice, empty
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Filled:
    """A text without holes."""

    text: str
    holes: tuple[FilledHole, ...]
    stats: Stats
    warnings: tuple[str, ...] = ()


def make_filled(parts: Sequence[Part], outcome: FillOutcome, decode: Decode) -> Filled:
    """The text of a fill. parts: as they were given; their texts come back unchanged."""
    given = [part for part in parts if isinstance(part, Hole)]
    holes = tuple(
        _filled_hole(hole, ids, top, tried, decode)
        for hole, ids, top, tried in zip(
            given, outcome.holes, outcome.top, outcome.tried, strict=True
        )
    )
    texts = iter(hole.text for hole in holes)
    text = "".join(part if isinstance(part, str) else next(texts) for part in parts)
    return Filled(text, holes, outcome.stats, outcome.warnings)


def _filled_hole(
    hole: Hole,
    ids: list[int],
    top: tuple[Tensor, Tensor] | None,
    tried: Sequence[Tried],
    decode: Decode,
) -> FilledHole:
    shares = _shares([each.score for each in tried])
    alternatives = tuple(
        Alternative(decode(each.ids), len(each.ids), each.score, share)
        for each, share in zip(tried, shares, strict=True)
    )
    if hole.choices is None:
        assert top is not None  # its positions were open
        probabilities: list[float] = top[1][:, 0].tolist()
        probability = math.prod(probabilities)
        return FilledHole(decode(ids), ids, probability, probabilities, alternatives)
    chosen = (a.probability for a, t in zip(alternatives, tried, strict=True) if t.ids == (*ids,))
    return FilledHole(decode(ids), ids, next(chosen, 1.0), [], alternatives)


def _shares(scores: Sequence[float]) -> list[float]:
    """Softmax."""
    top = max(scores, default=0.0)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]
