"""Temperatures of questions: kept in a TOML file beside the file of questions, and applied.

A temperature holds for one wording of a question, one model and one way of reading, so all three
are in the file, and `apply` refuses others. Knows no fitting and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from sfumato.decisions.fit import HIGHEST, LOWEST, Fitted, Metrics, tempered
from sfumato.decisions.question_file import read_toml
from sfumato.diffusion.constraints.questions import Answer, Question, Reading

FORMAT = 1


@dataclass(frozen=True)
class ModelIdentity:
    """What answers depend on of a model: `Model.identity` has it."""

    name: str = field(compare=False)  # of its file or folder, for people
    weights: str  # a fingerprint
    dtype: str
    activations: str
    quantize: str  # how it was quantized while it was loaded; "": it was not


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
    keys = [each.name for each in fields(ModelIdentity)]
    texts = model if isinstance(model, dict) else {}
    if not all(isinstance(texts.get(key), str) for key in keys) or not isinstance(tables, dict):
        raise ValueError(
            f"{path}: must have a model with {', '.join(keys)}, and tables such as "
            "[questions.urgent]; `sfumato calibrate` writes such files"
        )
    identity = ModelIdentity(**{key: texts[key] for key in keys})
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
    """What `Model.decide` says of them."""

    seed: int
    samples: int | Literal["auto"]
    orders: int
    order: Literal["state", "schema"]
    steps: int
    joint: bool
    label_mass: bool
    calibration: Calibration | str | PathLike[str] | None
