"""From a text with holes to canvases and back: what stands before them, what is pinned and what is
open, what a hole is tried with, and the text as its caller reads it.

Knows ids and how texts are encoded, and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sfumato.diffusion.constraints.hole import Hole, Part
from sfumato.diffusion.constraints.questions import softmax
from sfumato.diffusion.constraints.read_template import NOISE, narrowest
from sfumato.diffusion.limits import Stats
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.model_config import NO_BLOCKS, Blocks
from sfumato.options.limits import TRIALS
from sfumato.refused import Refused

Encode = Callable[[str, str], list[int]]
"""Ids of a text, and the name of the field that has it, for messages."""

Filling = int | tuple[int, ...]
"""What stands in a hole: so many open positions, or pinned tokens."""


@dataclass(frozen=True)
class Closing:
    """What follows a text that ends within its canvas."""

    end_id: int
    filler_id: int


@dataclass(frozen=True)
class Form:
    """A canvas of a fill."""

    ids: tuple[int, ...]  # NOISE at open positions
    holes: tuple[slice, ...]  # positions of each hole
    content: int  # positions before the filler, an end token included

    @property
    def pins(self) -> dict[int, int]:
        """Position → its fixed token."""
        return {place: token for place, token in enumerate(self.ids) if token != NOISE}


@dataclass(frozen=True)
class FillTemplate:
    """A text with holes as tokens. `prefix` goes into the cache; of the rest, `items` has the
    tokens of each text, and the number of each hole."""

    parts: tuple[Part, ...]
    prefix: list[int]
    items: tuple[tuple[int, ...] | int, ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]  # of each hole, as tokens
    longest: tuple[int, ...]  # tokens of each hole at most
    closing: Closing | None
    canvas_length: int  # positions at most
    warnings: tuple[str, ...] = ()

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

    def form(self, fillings: Mapping[int, Filling]) -> Form:
        """The canvas with these fillings; a hole that has none is open at its longest."""
        ids: list[int] = []
        holes: list[slice] = []
        for item in self.items:
            start = len(ids)
            if isinstance(item, tuple):
                ids += item
                continue
            filling = fillings.get(item, self.longest[item])
            ids += [NOISE] * filling if isinstance(filling, int) else filling
            holes.append(slice(start, len(ids)))
        content = len(ids)
        if self.closing is not None and content < self.canvas_length:
            ids.append(self.closing.end_id)
            # At least one token of filler: without it, a model is less sure of where a text ends.
            width = narrowest(content + 2, self.canvas_length) or self.canvas_length
            ids += [self.closing.filler_id] * (width - len(ids))
            content += 1
        return Form(tuple(ids), tuple(holes), content)


@dataclass(frozen=True)
class FillPlan:
    """A fill that can be done."""

    template: FillTemplate
    config: SamplerConfig  # complete; canvas_length is the longest canvas's
    seed: int
    blocks: Blocks = NO_BLOCKS  # of the prefix


def make_template(
    parts: Sequence[Part],
    encode: Encode,
    prompt: Sequence[int],
    closing: Closing | None,
    room: Callable[[int], int],
    is_causal: bool = True,
) -> FillTemplate:
    """parts: checked; prompt: ids of what comes before the text; closing: None where more text
    follows than the parts have; room: positions of a canvas behind a prefix of so many tokens;
    is_causal: whether a hole is scored in the causal mode.

    All of the text stands on the canvas where it fits there. Where it does not, what comes before
    the first hole goes into the prefix, and what comes after the last hole is cut at its end.
    Raises ValueError for holes that are too far apart for one canvas."""
    items, choices = _tokens(parts, encode)
    first = next(place for place, item in enumerate(items) if isinstance(item, int))
    holes = [part for part in parts if isinstance(part, Hole)]
    pairs = zip(holes, choices, strict=True)
    longest = [hole.tokens or hole.at_most or max(map(len, texts)) for hole, texts in pairs]
    sizes = [len(item) if isinstance(item, tuple) else longest[item] for item in items]
    warnings: list[str] = []
    prefix = list(prompt)
    if sum(sizes) > room(len(prefix)) or not prefix:
        prefix += [token for item in items[:first] if isinstance(item, tuple) for token in item]
        items, sizes = items[first:], sizes[first:]
    if not prefix:
        raise Refused(
            "parts",
            "must begin with text, since this model has no token to begin with",
            "or give messages",
        )
    begins = any(hole.varies for hole in holes) and isinstance(items[0], int)
    if begins and is_causal and len(prefix) > 1:
        # A hole is scored from the hidden state of the token before it, which no slot has.
        items, sizes = [(prefix.pop(),), *items], [1, *sizes]
    canvas_length = room(len(prefix))
    if sum(sizes) > canvas_length:
        items, warning = _cut(items, sum(sizes), canvas_length)
        warnings.append(warning)
        closing = None
    return FillTemplate(
        tuple(parts),
        prefix,
        tuple(items),
        tuple(choices),
        tuple(longest),
        closing,
        canvas_length,
        tuple(warnings),
    )


def _cut(
    items: list[tuple[int, ...] | int], size: int, canvas_length: int
) -> tuple[list[tuple[int, ...] | int], str]:
    """Items of `size` tokens whose text after the last hole is cut to fit, and a warning. Raises
    ValueError where that does not suffice."""
    last = items[-1] if isinstance(items[-1], tuple) else ()
    kept = len(last) - (size - canvas_length)
    if kept < 0:
        raise Refused(
            "parts",
            f"the holes and the text between them take {size - len(last):,} tokens, and a canvas "
            f"has {canvas_length}",
            "fill fewer holes, or shorter ones, at a time",
        )
    warning = (
        f"of the text after the last hole, {kept} of {len(last):,} tokens were read: the "
        f"canvas has {canvas_length} positions"
    )
    return [*items[:-1], *([last[:kept]] if kept else [])], warning


def _tokens(
    parts: Sequence[Part], encode: Encode
) -> tuple[list[tuple[int, ...] | int], list[tuple[tuple[int, ...], ...]]]:
    """The items of a template, and the choices of its holes."""
    items: list[tuple[int, ...] | int] = []
    choices: list[tuple[tuple[int, ...], ...]] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            items.append(tuple(encode(part, f"parts[{place}]")))
            continue
        items.append(len(choices))
        texts = part.choices or ()
        encoded = [
            tuple(encode(text, f"parts[{place}].choices[{n}]")) for n, text in enumerate(texts)
        ]
        choices.append(tuple(encoded))
    return items, choices


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
        self._first = self._queue[0]
        self.is_decided = len(self._queue) == 1  # before any score
        self.tried: list[Tried] = []  # with their scores

    def next(self) -> list[Filling]:
        """The next fillings to try, at most TRIALS; none where the best is known."""
        if not self._queue and self._is_length:
            lengths = {len(each.ids) for each in self.tried}
            self._queue = [*lengths_beside(len(self._best), lengths)]
        now, self._queue = self._queue[:TRIALS], self._queue[TRIALS:]
        return now

    @property
    def best(self) -> Filling:
        if not self.tried:
            return self._first
        return len(self._best) if self._is_length else self._best

    @property
    def _best(self) -> tuple[int, ...]:
        """The ids of the highest score; of equal ones, those that were tried first."""
        return max(self.tried, key=lambda each: each.score).ids


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
    shares = softmax([each.score for each in tried]) if tried else ()
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
