"""Holes in a text, as a caller gives them. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.options.limits import MOST_CHOICES, MOST_HOLES, MOST_TOKENS, MOST_VARYING
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class Hole:
    """A gap in a text, which a model fills: of exactly `tokens` tokens, of 1 to `at_most` tokens,
    or one of the texts in `choices`. Exactly one of the three; raises ValueError otherwise."""

    tokens: int | None = None
    at_most: int | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.tokens, self.at_most, self.choices) if x is not None]
        if len(given) != 1:
            raise ValueError(
                "a hole has exactly one of tokens, at_most and choices, such as Hole(6), "
                f"Hole(at_most=8) or Hole(choices=['yes', 'no']); got {len(given)} of them"
            )
        for name in ("tokens", "at_most"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value <= MOST_TOKENS):
                raise Refused(
                    name, f"must be a whole number from 1 to {MOST_TOKENS}, got {quoted(value)}"
                )
        if self.choices is not None:
            object.__setattr__(self, "choices", _checked(self.choices))

    @property
    def varies(self) -> bool:
        """Whether several canvases are denoised, or scored, to fill it."""
        return self.tokens is None


Part = str | Hole
"""What a text with holes consists of."""


def _checked(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise Refused("choices", f"must be a list of texts, got {quoted(choices)}")
    if not 1 <= len(choices) <= MOST_CHOICES:
        raise Refused("choices", f"must be 1 to {MOST_CHOICES} texts, got {len(choices)}")
    for place, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise Refused(f"choices[{place}]", f"must be text that is not empty, got {text!r}")
    if len(set(choices)) < len(choices):
        raise Refused("choices", "two of them are the same text")
    return tuple(choices)


def check_parts(parts: object) -> tuple[Part, ...]:
    """The parts of a text. Raises ValueError, naming the part, for what is no text with holes."""
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise Refused(
            "parts",
            "must be a list of texts and holes, such as ['I am ', Hole(6), '.'], got "
            f"{quoted(parts)}",
        )
    for place, part in enumerate(parts):
        if not isinstance(part, str | Hole):
            raise Refused(f"parts[{place}]", f"must be text or a Hole, got {quoted(part)}")
    count = sum(isinstance(part, Hole) for part in parts)
    if not 1 <= count <= MOST_HOLES:
        raise Refused("parts", f"must have 1 to {MOST_HOLES} holes, got {count}")
    varying = sum(isinstance(part, Hole) and part.varies for part in parts)
    if varying > MOST_VARYING:
        raise Refused(
            "parts",
            f"at most {MOST_VARYING} holes of an open length or with choices, got {varying}",
            "fill them in several calls",
        )
    if len(parts) > 2 * MOST_HOLES + 1:
        raise Refused("parts", f"at most {2 * MOST_HOLES + 1}, got {len(parts)}", "join texts")
    return tuple(part for part in parts if part != "")
