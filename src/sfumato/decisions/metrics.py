"""How good probabilities are against labels: accuracy, NLL, Brier score, calibration error.

A table of probabilities is a list of rows, one a labelled state, each with the probability of every
option; the labels are the options' numbers. Knows no model and no question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[Sequence[float]]
BINS = 10
LEAST = 1e-30  # of a probability, before its logarithm


@dataclass(frozen=True)
class Metrics:
    """Figures over labelled rows."""

    accuracy: float  # share of rows whose most probable option is the label
    nll: float  # mean −ln p(label), nats
    brier: float  # mean Σᵢ (pᵢ − yᵢ)² over all options, 0..2
    ece: float  # expected calibration error of the most probable option, 0..1


@dataclass(frozen=True)
class Bin:
    """The rows whose most probable option has a probability in one tenth of 0..1."""

    count: int
    probability: float  # mean of the most probable option's
    accuracy: float


def metrics(rows: Rows, labels: Sequence[int]) -> Metrics:
    """At least one row."""
    count = len(rows)
    nll = sum(-math.log(max(row[label], LEAST)) for row, label in zip(rows, labels, strict=True))
    brier = sum(
        sum((p - (i == label)) ** 2 for i, p in enumerate(row))
        for row, label in zip(rows, labels, strict=True)
    )
    right = sum(_top(row) == label for row, label in zip(rows, labels, strict=True))
    ece = sum(each.count * abs(each.accuracy - each.probability) for each in bins(rows, labels))
    return Metrics(right / count, nll / count, brier / count, ece / count)


def bins(rows: Rows, labels: Sequence[int]) -> list[Bin]:
    """The bins that have rows, from low to high, of BINS equal widths. Guo et al., "On Calibration
    of Modern Neural Networks", 2017, section 2."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for row, label in zip(rows, labels, strict=True):
        top = _top(row)
        members[min(BINS - 1, int(row[top] * BINS))].append((row[top], top == label))
    return [
        Bin(len(each), sum(p for p, _ in each) / len(each), sum(r for _, r in each) / len(each))
        for each in members
        if each
    ]


def _top(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def tempered(probabilities: Sequence[float], temperature: float) -> tuple[float, ...]:
    """pᵢ^(1/T) / Σⱼ pⱼ^(1/T): over 1 flattens, under 1 sharpens, the order stays."""
    if temperature == 1.0:
        return tuple(probabilities)
    logs = [math.log(max(p, LEAST)) / temperature for p in probabilities]
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)
