"""What one slot of a canvas says: the probabilities of its labels, alone and in the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotReading:
    """probabilities: of the labels, which sum to 1; label_mass: theirs together among all tokens;
    is_label: whether the most probable of all tokens is one of them; both None where only the
    labels were scored."""

    probabilities: tuple[float, ...]
    label_mass: float | None = None
    is_label: bool | None = None

    @property
    def mass(self) -> float:
        assert self.label_mass is not None
        return self.label_mass


def slot_reading(
    logits: Sequence[float], labels: Sequence[int], vocabulary: tuple[float, int] | None
) -> SlotReading:
    """Of a slot's labels and their logits; vocabulary: the labels' share of it, and the most
    probable of all tokens, where these are known."""
    if vocabulary is None:
        return SlotReading(_softmax(logits))
    mass, argmax = vocabulary
    # Sums of float32 numbers: they may round to a little over 1.
    return SlotReading(_softmax(logits), min(1.0, mass), argmax in labels)


def _softmax(logits: Sequence[float]) -> tuple[float, ...]:
    peak = max(logits)
    masses = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(masses)
    return tuple(mass / total for mass in masses)
