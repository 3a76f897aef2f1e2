"""Fits the temperature of one question to labelled probabilities, and measures it on rows that it
was not fitted to. Knows no model and no files."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.decisions.metrics import LEAST, Metrics, Rows, metrics, tempered
from sfumato.refused import Refused

LOWEST, HIGHEST = 0.05, 20.0  # temperatures
LEAST_LABELS = 30  # with fewer the folds disagree about the temperature more than T = 1 is wrong
MOST_FOLDS = 20
_GOLDEN = (math.sqrt(5) - 1) / 2
_WIDTH = 1e-4  # of the last interval of ln T


@dataclass(frozen=True)
class Fitted:
    """A temperature and what it does on held-out rows."""

    temperature: float  # fitted to all rows; 1 where that does not help on held-out ones
    fold_temperatures: tuple[float, ...]
    labels: int
    before: Metrics
    after: Metrics  # each row by the temperature of the fold that left it out
    held_out: tuple[tuple[float, ...], ...]  # the probabilities of `after`, in the rows' order
    kept: bool  # whether the temperature stayed 1, since the fitted one did not help


def fit(rows: Rows, labels: Sequence[int], folds: int = 5, seed: int = 0) -> Fitted:
    """rows: probabilities of every option, a row a state; labels: numbers of the right options.

    Raises ValueError for too few labels, and where no two different ones are there.
    """
    if not 2 <= folds <= MOST_FOLDS:
        raise Refused("folds", f"must be 2 to {MOST_FOLDS}, got {folds}")
    least = max(LEAST_LABELS, 2 * folds)
    if len(labels) < least:
        raise ValueError(
            f"has {len(labels)} labels; a temperature needs {least} at least, and some hundred for "
            "two digits of its metrics"
        )
    if len(set(labels)) < 2:
        raise ValueError(
            f"all {len(labels)} labels are the same; add states with other labels, or every "
            "temperature looks right"
        )
    temperatures, held_out = [], list(map(tuple, rows))
    for members in _folds(len(labels), folds, seed):
        inside = set(members)
        rest = [i for i in range(len(labels)) if i not in inside]
        fitted = best_temperature([rows[i] for i in rest], [labels[i] for i in rest])
        temperatures.append(fitted)
        for i in members:
            held_out[i] = tempered(rows[i], fitted)
    before, after = metrics(rows, labels), metrics(held_out, labels)
    kept = after.nll >= before.nll
    chosen = 1.0 if kept else best_temperature(rows, labels)
    return Fitted(chosen, tuple(temperatures), len(labels), before, after, tuple(held_out), kept)


def _folds(count: int, folds: int, seed: int) -> list[list[int]]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [order[i::folds] for i in range(folds)]


def best_temperature(rows: Rows, labels: Sequence[int]) -> float:
    """The temperature of the least NLL within LOWEST..HIGHEST, by golden-section search over ln T.

    The NLL is convex in 1/T, so it has one valley over ln T too."""
    logs = [[math.log(max(p, LEAST)) for p in row] for row in rows]

    def loss(log_temperature: float) -> float:
        inverse = math.exp(-log_temperature)
        return math.fsum(_nll(row, label, inverse) for row, label in zip(logs, labels, strict=True))

    low, high = math.log(LOWEST), math.log(HIGHEST)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    left_loss, right_loss = loss(left), loss(right)
    while high - low > _WIDTH:
        if left_loss <= right_loss:
            high, right, right_loss = right, left, left_loss
            left = high - _GOLDEN * (high - low)
            left_loss = loss(left)
        else:
            low, left, left_loss = left, right, right_loss
            right = low + _GOLDEN * (high - low)
            right_loss = loss(right)
    return math.exp((low + high) / 2)


def _nll(logs: Sequence[float], label: int, inverse: float) -> float:
    """−ln of the label's probability at temperature 1 / inverse."""
    most = max(logs)
    total = math.fsum(math.exp((log - most) * inverse) for log in logs)
    return math.log(total) - (logs[label] - most) * inverse
