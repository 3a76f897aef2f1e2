"""Fits the temperature of one question to labelled probabilities, measures it on rows that it was
not fitted to (accuracy, NLL, Brier score, calibration error), and plots how reliable answers are.

A table of probabilities is a list of rows, one a labelled state, each with the probability of every
option; the labels are the options' numbers. Knows no model, no question and no files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from sfumato.diffusion.constraints.questions import softmax
from sfumato.refused import Refused

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
    return softmax([math.log(max(p, LEAST)) / temperature for p in probabilities])


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


SIDE, LEFT, TOP, GAP = 220, 56, 44, 64  # pixels: of a square of axes, and around it
COLUMNS = 3
_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600}
.axis{stroke:#8b949e;fill:none}.ideal{stroke:#8b949e;stroke-dasharray:4 4}
.before{stroke:#d1602f;fill:#d1602f}.after{stroke:#2f7ed1;fill:#2f7ed1}
@media(prefers-color-scheme:dark){text{fill:#adbac7}.before{stroke:#f0883e;fill:#f0883e}\
.after{stroke:#6cb6ff;fill:#6cb6ff}}
.line{fill:none;stroke-width:2}"""


def plot(fitted: Mapping[str, tuple[Fitted, Rows, Sequence[int]]]) -> str:
    """An SVG file with a square for each question: its fit, its rows before, and its labels."""
    columns = min(COLUMNS, len(fitted))
    width = LEFT + columns * (SIDE + GAP)
    height = -(-len(fitted) // columns) * (TOP + SIDE + GAP) + 24
    squares = []
    for number, (name, (fit, rows, labels)) in enumerate(fitted.items()):
        x = LEFT + number % columns * (SIDE + GAP)
        y = TOP + number // columns * (TOP + SIDE + GAP)
        squares.append(f'<g transform="translate({x} {y})">{_square(name, fit, rows, labels)}</g>')
    legend = (
        f'<g transform="translate({LEFT} {height - 12})"><text class="before" '
        'style="stroke:none">before</text><text class="after" x="60" style="stroke:none">after, on '
        "held-out folds</text></g>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Reliability of the answers, before and after '
        f'calibration">\n<style>{_STYLE}</style>\n' + "\n".join([*squares, legend]) + "\n</svg>\n"
    )


def _square(name: str, fit: Fitted, rows: Rows, labels: Sequence[int]) -> str:
    parts = [
        f'<text class="title" y="-22">{escape(_short(name))}</text>',
        f'<text y="-7">T {fit.temperature:.2f}, ECE {fit.before.ece:.3f} → {fit.after.ece:.3f}'
        "</text>",
        f'<rect class="axis" width="{SIDE}" height="{SIDE}"/>',
        f'<line class="ideal" x1="0" y1="{SIDE}" x2="{SIDE}" y2="0"/>',
        *(
            f'<text x="{SIDE * tick:.0f}" y="{SIDE + 16}" text-anchor="middle">{tick:g}</text>'
            f'<text x="-8" y="{SIDE * (1 - tick) + 4:.0f}" text-anchor="end">{tick:g}</text>'
            for tick in (0, 0.5, 1)
        ),
        f'<text x="{SIDE / 2}" y="{SIDE + 32}" text-anchor="middle">probability of the answer'
        "</text>",
        f'<text transform="translate(-36 {SIDE / 2}) rotate(-90)" text-anchor="middle">share right'
        "</text>",
        _curve("before", bins(rows, labels)),
        _curve("after", bins(fit.held_out, labels)),
    ]
    return "".join(parts)


def _curve(style: str, points: Sequence[Bin]) -> str:
    """A line through the bins; the area of a point grows with its rows."""
    most = max(each.count for each in points)
    at = [(SIDE * each.probability, SIDE * (1 - each.accuracy)) for each in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    radii = (2 + 4 * (each.count / most) ** 0.5 for each in points)
    dots = "".join(
        f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
        f"<title>{each.count} rows, probability {each.probability:.2f}, right {each.accuracy:.2f}"
        "</title></circle>"
        for (x, y), radius, each in zip(at, radii, points, strict=True)
    )
    return f'<polyline class="{style} line" points="{line}"/>{dots}'


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"
