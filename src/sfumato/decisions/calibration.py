"""Temperatures of questions: fitted to labelled probabilities, measured on rows that they were not
fitted to (accuracy, NLL, Brier score, calibration error), plotted, kept in a TOML file beside the
file of questions, and applied.

A table of probabilities is a list of rows, one a labelled state, each with the probability of every
option; the labels are the options' numbers. A temperature holds for one wording of a question, one
model and one way of reading, so all three are in the file, and `apply` refuses others. Knows no
model.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict
from xml.sax.saxutils import escape

from sfumato.decisions.question_file import read_toml
from sfumato.diffusion.constraints.questions import Answer, Question, Reading, softmax
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


FORMAT = 1


@dataclass(frozen=True)
class ModelIdentity:
    """What answers depend on of a model: `Model.identity` has it."""

    name: str = field(compare=False)  # of its file or folder, for people
    weights: str  # a fingerprint
    dtype: str
    activations: str
    quantize: str  # how it was quantized while it was loaded; "": it was not
    # A fingerprint of the vision tower, and the mask: no answer about text depends on them.
    pictures: str = field(default="", compare=False)


_HOW_LOADED = "dtype", "activations", "quantize"


@dataclass(frozen=True)
class Temperature:
    """The calibration of one question."""

    temperature: float
    wording: str  # of the question, as `wording` gives it


@dataclass(frozen=True)
class Calibration:
    """The temperatures of questions by name, and what they hold for."""

    model: ModelIdentity
    reading: Reading
    questions: Mapping[str, Temperature]
    path: Path | None = field(default=None, compare=False)

    def apply(
        self,
        answers: Mapping[str, Answer],
        questions: Mapping[str, Question],
        model: ModelIdentity,
        reading: Reading,
    ) -> dict[str, Answer]:
        """The answers with the probabilities that the temperatures make of them; a question that
        has no temperature keeps its own. Raises ValueError as `check`."""
        self.check(questions, model, reading)
        return {
            name: replace(
                answer,
                probabilities=tempered(answer.probabilities, self.questions[name].temperature),
            )
            if name in self.questions
            else answer
            for name, answer in answers.items()
        }

    def check(
        self, questions: Mapping[str, Question], model: ModelIdentity, reading: Reading
    ) -> None:
        """Raises ValueError where the temperatures hold for something else."""
        where = f"{self.path}: " if self.path else "calibration: "
        if model.weights != self.model.weights:
            raise ValueError(
                f"{where}is of the model {self.model.name!r} with the weights "
                f"{self.model.weights}, and this one is {model.name!r} with the weights "
                f"{model.weights}; run `sfumato calibrate` with this one"
            )
        of_model = [(name, "this model is loaded with", "load it with") for name in _HOW_LOADED]
        of_reading = [(f.name, "this has", f"set {f.name} to") for f in fields(Reading)]
        for ours, theirs, names in (
            (self.model, model, of_model),
            (self.reading, reading, of_reading),
        ):
            for name, has, advice in names:
                made, now = getattr(ours, name), getattr(theirs, name)
                if made != now:
                    raise ValueError(
                        f"{where}was made with {name} = {made!r}, and {has} {now!r}; {advice} "
                        f"{made!r}, or run `sfumato calibrate` with {now!r}"
                    )
        if not set(questions) & set(self.questions):
            raise ValueError(f"{where}has no temperature for any of these questions")
        for name, question in questions.items():
            made_for = self.questions.get(name)
            if made_for and made_for.wording != wording(question, questions, reading.joint):
                raise ValueError(
                    f"{where}the question {name!r} has other words than when it was calibrated; "
                    "run `sfumato calibrate` again"
                )


def wording(question: Question, questions: Mapping[str, Question], joint: bool) -> str:
    """A short hash of all that a model reads of a question; jointly, of all questions."""
    read = [question, *questions.values()] if joint else [question]
    parts = [
        [type(each).__name__, each.instructions, [[o.name, o.description] for o in each.options]]
        for each in read
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def calibration_path(questions: Path, name: str) -> Path:
    """q.toml and "default" → q.default.calibration.toml"""
    return questions.with_name(f"{questions.stem}.{name}.calibration.toml")


def find_calibration(questions: Path, name_or_path: str) -> Calibration:
    """A calibration by its name, beside the file of questions, or by its path. Raises OSError where
    there is none, ValueError where the file is malformed."""
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path
    path = Path(name_or_path) if is_path else calibration_path(questions, name_or_path)
    return read_calibration(path)


def read_calibration(path: str | PathLike[str]) -> Calibration:
    """Raises OSError where the file cannot be read, ValueError naming the file and the key."""
    path = Path(path)
    raw = read_toml(path)
    if raw.get("format") != FORMAT:
        raise ValueError(f"{path}: format must be {FORMAT}; `sfumato calibrate` writes such files")
    model, tables = raw.get("model"), raw.get("questions")
    keys = [each.name for each in fields(ModelIdentity) if each.default is MISSING]
    texts = model if isinstance(model, dict) else {}
    if not all(isinstance(texts.get(key), str) for key in keys) or not isinstance(tables, dict):
        raise ValueError(
            f"{path}: must have a model with {', '.join(keys)}, and tables such as "
            "[questions.urgent]; `sfumato calibrate` writes such files"
        )
    pictures = texts.get("pictures", "")
    identity = ModelIdentity(**{key: texts[key] for key in keys}, pictures=str(pictures))
    reading = Reading(**{each.name: _like(path, raw, each.name) for each in fields(Reading)})
    return Calibration(
        identity, reading, {name: _temperature(path, name, t) for name, t in tables.items()}, path
    )


def _like(path: Path, raw: Mapping[str, Any], name: str) -> Any:
    default = getattr(Reading(), name)
    value = raw.get(name, default)
    if type(value) is not type(default) and not (name == "samples" and value == "auto"):
        raise ValueError(f"{path}: {name}: {value!r:.80} is no such value as {default!r}")
    return value


def _temperature(path: Path, name: str, table: Any) -> Temperature:
    value = table.get("temperature") if isinstance(table, dict) else None
    wording = table.get("wording") if isinstance(table, dict) else None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not (LOWEST <= number <= HIGHEST and isinstance(wording, str)):
        raise ValueError(
            f"{path}: [questions.{name:.80}] must have a temperature from {LOWEST} to {HIGHEST} "
            "and a wording"
        )
    return Temperature(float(number), wording)


def calibration_text(
    model: ModelIdentity,
    reading: Reading,
    questions: Mapping[str, Question],
    fitted: Mapping[str, Fitted],
    made: str,
) -> str:
    """The TOML of a calibration; made: the day, as 2026-11-22."""
    lines = [
        "# Written by `sfumato calibrate`; metrics are of held-out folds.",
        f"format = {FORMAT}",
        f"model = {{ {', '.join(f'{k} = {_toml(v)}' for k, v in asdict(model).items())} }}",
        f"made = {_toml(made)}",
        *(f"{key} = {_toml(value)}" for key, value in asdict(reading).items()),
    ]
    for name, fit in fitted.items():
        key = _toml(name)
        temperatures = ", ".join(f"{t:.4f}" for t in fit.fold_temperatures)
        lines += [
            f"\n[questions.{key}]",
            f"temperature = {fit.temperature:.4f}",
            f"wording = {_toml(wording(questions[name], questions, reading.joint))}",
            f"labels = {fit.labels}",
            f"fold_temperatures = [{temperatures}]",
            f"before = {_metrics(fit.before)}",
            f"after = {_metrics(fit.after)}",
        ]
    return "\n".join(lines) + "\n"


def _metrics(figures: Metrics) -> str:
    return "{ " + ", ".join(f"{key} = {value:.5f}" for key, value in asdict(figures).items()) + " }"


def _toml(value: str | int | bool) -> str:
    """A plain value as TOML; JSON's text is TOML's basic string, but for U+007F."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class DecideOptions(TypedDict, total=False):
    """Keyword arguments of `Model.decide`, whose docstring describes each."""

    seed: int
    samples: int | Literal["auto"]
    orders: int
    order: Literal["state", "schema"]
    steps: int
    joint: bool
    label_mass: bool
    verify: Literal["abstain"] | None
    calibration: Calibration | str | PathLike[str] | None
    adapter: str | None
