"""From a text with holes to canvases: what stands before them, what is pinned, and what is open.

Knows ids and how a text is encoded, and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.hole import Hole, Part
from sfumato.diffusion.constraints.read_template import NOISE, narrowest
from sfumato.diffusion.sampler_config import SamplerConfig
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
    closing: Closing | None
    canvas_length: int  # positions at most
    warnings: tuple[str, ...] = ()

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

    def longest(self, hole: int) -> int:
        """Tokens of a hole at most."""
        given = self.holes[hole]
        exact = given.tokens or given.at_most
        return exact or max(map(len, self.choices[hole]))

    def form(self, fillings: Mapping[int, Filling]) -> Form:
        """The canvas with these fillings; a hole that has none is open at its longest."""
        ids: list[int] = []
        holes: list[slice] = []
        for item in self.items:
            start = len(ids)
            if isinstance(item, tuple):
                ids += item
                continue
            filling = fillings.get(item, self.longest(item))
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


def make_template(
    parts: Sequence[Part],
    encode: Encode,
    prompt: Sequence[int],
    closing: Closing | None,
    canvas_length: int,
) -> FillTemplate:
    """parts: checked; prompt: ids of what comes before the text; closing: None where more text
    follows than the parts have.

    All of the text stands on the canvas where it fits there. Where it does not, what comes before
    the first hole goes into the prefix, and what comes after the last hole is cut at its end.
    Raises ValueError for holes that are too far apart for one canvas."""
    items, choices = _tokens(parts, encode)
    first = next(place for place, item in enumerate(items) if isinstance(item, int))
    template = FillTemplate(
        tuple(parts), list(prompt), tuple(items), tuple(choices), closing, canvas_length
    )
    sizes = [len(item) if isinstance(item, tuple) else template.longest(item) for item in items]
    warnings: list[str] = []
    prefix = list(prompt)
    if sum(sizes) > canvas_length or not prefix:
        prefix += [token for item in items[:first] if isinstance(item, tuple) for token in item]
        items, sizes = items[first:], sizes[first:]
    if not prefix:
        raise Refused(
            "parts",
            "must begin with text, since this model has no token to begin with",
            "or give messages",
        )
    varies = any(hole.varies for hole in template.holes)
    if varies and isinstance(items[0], int) and len(prefix) > 1:
        # A hole is scored from the hidden state of the token before it, which no slot has.
        items, sizes = [(prefix.pop(),), *items], [1, *sizes]
    over = sum(sizes) - canvas_length
    if over > 0:
        last = items[-1] if isinstance(items[-1], tuple) else ()
        if len(last) < over:
            raise Refused(
                "parts",
                f"the holes and the text between them take {sum(sizes) - len(last):,} tokens, "
                f"and a canvas has {canvas_length}",
                "fill fewer holes, or shorter ones, at a time",
            )
        kept = len(last) - over
        items = [*items[:-1], *([last[:kept]] if kept else [])]
        warnings.append(
            f"of the text after the last hole, {kept} of {len(last):,} tokens were read: the "
            f"canvas has {canvas_length} positions"
        )
        closing = None
    return FillTemplate(
        tuple(parts),
        prefix,
        tuple(items),
        tuple(choices),
        closing,
        canvas_length,
        tuple(warnings),
    )


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
