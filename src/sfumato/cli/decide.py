"""`sfumato decide` and `sfumato calibrate`: questions of a file about texts, or rows of a table.

One engine is asked about a few rows at a time. `calibrate` fits a temperature for each question to
a table of labelled rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sfumato.api import Model
from sfumato.cli import INTERRUPTED, files, generation, pictures, terminal
from sfumato.cli.files import Printed, Row, Source, Target, cell_text
from sfumato.cli.rows import Outcome, request_rows
from sfumato.cli.terminal import table
from sfumato.decisions.calibration import (
    HIGHEST,
    LOWEST,
    Calibration,
    Fitted,
    ModelIdentity,
    Reading,
    calibration_path,
    calibration_text,
    find_calibration,
    fit,
    plot,
)
from sfumato.decisions.question_file import QuestionFile, State, json_text, read_questions
from sfumato.decisions.schema import Choice, Decision, TypedAnswer, YesNo, shown
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion
from sfumato.engine import Engine
from sfumato.engine.events import Decided, Handle
from sfumato.engine.request import DecisionRequest
from sfumato.options import exclusions
from sfumato.refused import Refused

ERROR = "error"
_DIGITS = 6
_FIELDS = {
    "yes/no": ("answer", "probability"),
    "choice": ("answer", "confidence"),
    "score": ("answer", "score", "confidence"),
}
"""The columns that answers to a kind of question always have."""

MOST_REASONS = 100  # that are told apart
SHOWN_REASONS, SHOWN_OPTIONS = 5, 12
LEAST_MASS = 0.5  # of a mean label mass, below which the summary has a note
MOST_PROBABILITIES = 2_000_000  # of all rows, questions and options: fitting them takes a minute
MOST_ERRORS = 5  # of rows, that are shown
_NAME = "letters, digits, - and _"


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    return _calibrate(args) if args.command == "calibrate" else _decide(args)


def _decide(args: argparse.Namespace) -> int:
    is_one = args.state is not None or bool(args.image)
    if (args.table is None) != is_one:
        raise ValueError(
            "give a table, or a text with --state and pictures with --image, and not both"
        )
    if is_one and args.out is not None:
        raise ValueError("--out names the file for the answers to a table, and there is none")
    file = read_questions(args.questions)
    calibration = find_calibration(file.path, args.calibration) if args.calibration else None
    exclusions.check(
        exclusions.DECISION, {"calibration": args.calibration, "adapter": args.adapter}
    )
    adapter = generation.ADAPTER if args.adapter else None
    reading = reading_of(args), args.seed, not args.no_label_mass
    verify: Literal["abstain"] | None = "abstain" if args.verify else None
    asking = Asking(file, file.schema.questions, *reading, calibration, adapter, verify)
    return _one(args, asking) if is_one else _table(args, asking)


def _one(args: argparse.Namespace, asking: Asking) -> int:
    """One state: bars, or an object of JSON."""
    # Before the model is loaded: a file may be no picture.
    images = [pictures.read(name, f"--image {name}") for name in args.image]
    text: str = files.read_text("-") if args.state == "-" else args.state or ""
    state: State = pictures.content(text, [{"type": "image", "image": each} for each in images])
    model, questions = generation.load(args), asking.file.questions
    generation.note_deciding(model)
    how = {**asking.options, "adapter": asking.adapter}
    decision = model.decide(state, questions, calibration=asking.calibration, **how)
    cells = cells_of(asking.columns(probabilities=True), decision, "")
    terminal.print_report(args.json, cells, [str(decision)])
    return 0


def _table(args: argparse.Namespace, asking: Asking) -> int:
    source = Source(args.table)
    # The whole table is checked before a model is loaded: a mistake in its last row shows now.
    total, columns = source.scan(lambda row: row_state(asking.file, row.cells))
    answers = asking.columns(args.probabilities)
    beside = names_beside(answers, columns)
    with _target(args, asking, source, columns, beside) as target:
        summary = Summary(asking.questions, target.count)
        rows = _rest(source, target, columns, total)
        if target.count < total:
            model = generation.load(args)
            generation.note_deciding(model)
            asking.check(model)
            began = time.perf_counter()
            for outcome in request_rows(args, model, asking.ask, rows, total, target.count):
                decided = outcome.result
                decision = None if decided is None else asking.decision(decided, model.identity)
                target.append({**outcome.row.cells, **cells_of(answers, decision, outcome.error)})
                summary.add(decision, outcome.error)
            summary.seconds = time.perf_counter() - began
    figures, is_printed = summary.figures(), isinstance(target, Printed)
    if is_printed:  # the answers are what standard output has
        terminal.print_lines(lines(figures), sys.stderr)
    else:
        terminal.print_report(args.json, figures, lines(figures))
    done = target.count + summary.rows
    if done < total:
        text = "a file of --out is taken up" if is_printed else "the same command goes on"
        terminal.print_message("note", f"stopped after {done:,} of {total:,} rows; {text}")
        return INTERRUPTED
    return 0


def _target(
    args: argparse.Namespace,
    asking: Asking,
    source: Source,
    columns: list[str],
    beside: list[str],
) -> AbstractContextManager[Target | Printed]:
    """Where answers go: the file of --out, or standard output in the format of the table. columns:
    of the table; beside: those of the answers. Raises ValueError or OSError for a file that cannot
    be written."""
    if args.out in (None, "-"):
        delimiter = None if args.json else files.delimiter_of(source.path)
        return nullcontext(Printed([*columns, *beside], delimiter))
    out = Path(args.out)
    if out.exists() and out.samefile(source.path):
        raise Refused("out", f"{out} is the table itself", "name another file")
    if not out.parent.is_dir():
        raise Refused("out", f"{out}: its folder does not exist", "make it first")
    # The rows of JSON Lines may have any keys.
    names = beside if out.suffix.lower() == ".jsonl" else [*columns, *beside]
    return Target(args.out, names, _made(args, asking), args.force)


def _made(args: argparse.Namespace, asking: Asking) -> dict[str, Any]:
    """What decides the answers besides the rows, as plain values: two runs that agree in it may
    write one file."""
    file, calibration = asking.file, asking.calibration
    text = json.dumps([repr(file.questions), file.state and file.state.text])
    return {
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        **generation.loaded_as(args),
        "calibration": calibration and repr(sorted(calibration.questions.items())),
        **asking.options,
    }


def _rest(
    source: Source, target: Target | Printed, columns: list[str], total: int
) -> Iterator[Row]:
    """The rows that the target does not have. Raises ValueError where those that it has are of
    another table."""
    rows = source.rows()
    if not target.count:
        return rows
    last = next(islice(rows, target.count - 1, None), None) if target.count <= total else None
    same = last is not None and all(
        cell_text(target.last.get(name)) == cell_text(last.cells.get(name)) for name in columns
    )
    if not same:
        raise ValueError(
            f"{target.path}: its {target.count:,} rows are not the first of {source.path}; name "
            "another file with --out, or replace it with --force"
        )
    return rows


@dataclass
class Tally:
    """The answers to one question."""

    answers: Counter[str] = field(default_factory=Counter)
    confidence: float = 0.0  # sums
    label_mass: float = 0.0
    masses: int = 0
    undecided: int = 0

    def add(self, answer: TypedAnswer) -> None:
        self.answers[shown(answer.value)] += 1
        self.confidence += answer.confidence
        self.undecided += answer.undecided
        if answer.label_mass is not None:
            self.label_mass += answer.label_mass
            self.masses += 1

    def figures(self) -> dict[str, Any]:
        count = self.answers.total()
        return {
            "answers": dict(self.answers.most_common()),
            "mean_confidence": self.confidence / count if count else None,
            "mean_label_mass": self.label_mass / self.masses if self.masses else None,
            "undecided": self.undecided,
        }


class Summary:
    """Adds rows up as they come."""

    def __init__(self, questions: Iterable[str], before: int) -> None:
        """before: rows that an earlier run has decided."""
        self.rows, self.before = 0, before
        self.seconds = 0.0  # in which rows were decided, and no model was loaded
        self._tallies = {name: Tally() for name in questions}
        self._reasons: Counter[str] = Counter()

    def add(self, decision: Decision[Any] | None, error: str) -> None:
        self.rows += 1
        if decision is None:
            known = error in self._reasons or len(self._reasons) < MOST_REASONS
            self._reasons[error if known else "other reasons"] += 1
            return
        for name, answer in decision.items():
            self._tallies[name].add(answer)

    @property
    def failed(self) -> int:
        return self._reasons.total()

    def figures(self) -> dict[str, Any]:
        """All as plain values."""
        answered = (self.rows - self.failed) * len(self._tallies)
        return {
            "rows": self.rows,
            "rows_before": self.before,
            "seconds": self.seconds,
            "questions_per_second": answered / self.seconds if self.seconds else None,
            "failed": self.failed,
            "reasons": dict(self._reasons.most_common()),
            "questions": {name: tally.figures() for name, tally in self._tallies.items()},
        }


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    speed = figures["questions_per_second"]
    rate = f", {speed:.3g} questions/s" if speed else ""
    before = f" ({figures['rows_before']:,} were there already)" if figures["rows_before"] else ""
    out = [f"{figures['rows']:,} rows decided in {figures['seconds']:.1f} s{rate}{before}"]
    rows = [("question", "confidence", "label mass", "answers")]
    for name, each in figures["questions"].items():
        if not each["answers"]:
            continue
        counts = [f"{answer} {count:,}" for answer, count in each["answers"].items()]
        if len(counts) > SHOWN_OPTIONS:
            counts[SHOWN_OPTIONS:] = [f"{len(counts) - SHOWN_OPTIONS} others"]
        means = each["mean_confidence"], each["mean_label_mass"]
        confidence, mass = ("" if mean is None else f"{mean:.3f}" for mean in means)
        undecided = f"; {each['undecided']:,} undecided" if each["undecided"] else ""
        rows.append((name, confidence, mass, ", ".join(counts) + undecided))
    if len(rows) > 1:
        out += table(rows)
    masses = [each["mean_label_mass"] for each in figures["questions"].values()]
    if any(mass is not None and mass < LEAST_MASS for mass in masses):
        out.append(
            f"A label mass under {LEAST_MASS} says that the model hardly takes the options for "
            "answers; its probabilities then mean little (docs/decisions.md)."
        )
    if figures["failed"]:
        out.append(f"{figures['failed']:,} rows have no answers (see their column error):")
        reasons = list(figures["reasons"].items())
        out += [f"  {count:,} × {reason}" for reason, count in reasons[:SHOWN_REASONS]]
        if len(reasons) > SHOWN_REASONS:
            out.append(f"  and {len(reasons) - SHOWN_REASONS} other reasons")
    return out


@dataclass(frozen=True)
class Asking:
    """Questions of a file, and how they are read."""

    file: QuestionFile
    questions: Mapping[str, Question]  # those of the file that are read
    reading: Reading
    seed: int
    label_mass: bool
    calibration: Calibration | None = None
    adapter: str | None = None  # the name of the one that answers
    verify: Literal["abstain"] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Model.decide`, `DecisionSettings` and `DecisionRequest`."""
        how = {"seed": self.seed, "label_mass": self.label_mass, "verify": self.verify}
        return {**asdict(self.reading), **how}

    def check(self, model: Model) -> None:
        """Raises ValueError for questions that cannot be asked about any state at all, and for a
        calibration that is not for them."""
        model.plan_decision("", self.questions, DecisionSettings(**self.options))
        if self.calibration is not None:
            self.calibration.check(self.questions, model.identity, self.reading)

    def request(self, row: Row) -> DecisionRequest:
        """The request about a row."""
        state = row_state(self.file, row.cells)
        return DecisionRequest(state, self.questions, **self.options, adapter=self.adapter)

    def ask(self, engine: Engine, row: Row) -> Handle[Decided]:
        """Gives an engine the request about a row."""
        return engine.decide(self.request(row))

    def decision(self, decided: Decided, model: ModelIdentity) -> Decision[dict[str, Any]]:
        """The typed answers to all questions of the file. model: for the calibration."""
        answers = decided.answers
        if self.calibration is not None:
            answers = self.calibration.apply(answers, self.questions, model, self.reading)
        return self.file.schema.decision(answers, decided.usage)

    def columns(self, probabilities: bool) -> Columns:
        """The columns of the answers."""
        kinds = {YesNo: "yes/no", Choice: "choice"}
        named = {name: kinds.get(type(each), "score") for name, each in self.file.questions.items()}
        more = ["label_mass"] * self.label_mass
        if self.reading.samples != 1 or self.reading.orders > 1:
            more += ["spread", "order_spread"]
        more += ["other"] * (self.verify is not None)
        return columns_of(named, [*more, *["probabilities"] * probabilities])


def reading_of(args: argparse.Namespace) -> Reading:
    """How the options say that questions are read."""
    return Reading(args.samples, args.orders, args.order, args.steps, args.joint)


Columns = Mapping[str, tuple[str, str]]
"""The columns of answers: the question of each, and the field of the answer that it shows."""


def columns_of(kinds: Mapping[str, str], more: Iterable[str]) -> Columns:
    """kinds: "yes/no", "choice" or "score", by the names of questions; more: fields that stand
    behind those of all questions. Raises ValueError where two columns are the same."""
    fields = [(name, field) for name, kind in kinds.items() for field in _FIELDS[kind]]
    fields += [(name, field) for field in more for name in kinds]
    names = [*(f"{name}_{field}" for name, field in fields), ERROR]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two columns would have the name {name!r}; rename a question")
    return dict(zip(names, fields, strict=False))


def names_beside(columns: Columns, table: Collection[str]) -> list[str]:
    """The names of the columns, to stand behind those of a table. Raises ValueError, naming the
    column, where the table has it already."""
    names = [*columns, ERROR]
    for name in names:
        if name in table:
            raise ValueError(
                f"the table has a column {name!r} already, where answers would stand; rename "
                "the column or the question"
            )
    return names


def cells_of(columns: Columns, decision: Decision[Any] | None, error: str) -> dict[str, Any]:
    """The cells of a row. Where there is no decision all are empty but the error."""
    cells = {
        column: None if decision is None else _value(decision[name], field)
        for column, (name, field) in columns.items()
    }
    return {**cells, ERROR: error or None}


def _value(answer: TypedAnswer, field: str) -> Any:
    """The field of an answer as a plain value."""
    if field == "answer":
        return shown(answer.value)
    if field == "other":
        return shown(answer.other) if answer.undecided else None
    if field == "probabilities":
        return {shown(v): round(p, _DIGITS) for v, p in answer.probabilities.items()}
    value = answer.probabilities.get(True) if field == "probability" else getattr(answer, field)
    return None if value is None else round(value, _DIGITS)


def row_state(file: QuestionFile, cells: Mapping[str, Any]) -> str:
    """The state of a row: the file's template filled, or else all columns as JSON, but those that
    have the name of a question: they are labels. Raises ValueError where the template names a
    column that is not there, or nothing is left."""
    if file.state is not None:
        return file.state.fill(cells)
    left = {name: value for name, value in cells.items() if name not in file.questions}
    if not left:
        raise ValueError("every column has the name of a question, so no state is left")
    return json_text(left)


def label_number(question: Question, text: str) -> int | None:
    """The number of the option that a label's cell names; None for an empty cell.

    An option's own name comes first, then other words for yes and no, then a level's number from 0.
    Raises ValueError."""
    text = text.strip()
    if not text:
        return None
    names = [option.name for option in question.options]
    if text in names:
        return names.index(text)
    word = text.lower()
    if isinstance(question, YesNoQuestion):
        for number, words in enumerate((("yes", "true", "1"), ("no", "false", "0"))):
            if word in words:
                return number
    elif isinstance(question, ScoreQuestion) and word in map(str, range(len(names))):
        return int(word)
    raise ValueError(f"{text!r:.80} is none of {', '.join(names)[:200]}")


@dataclass
class Labelled:
    """The reads of one question in labelled rows, and the labels of these."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def _calibrate(args: argparse.Namespace) -> int:
    """Read, fit, store and print."""
    file = read_questions(args.questions)
    if not args.name.replace("-", "").replace("_", "").isalnum():
        raise Refused("name", f"{args.name!r:.80} has other characters than {_NAME}")
    path = calibration_path(file.path, args.name)
    for each in (path, path.with_suffix(".svg")):
        files.check(str(each), args.force, "name")
    source = Source(args.labelled)
    total, columns = source.scan(lambda row: _check_row(file, row))
    names = [name for name in file.questions if name in columns]
    if not names:
        raise ValueError(
            f"{source.path}: has no labels; give it a column for each question: "
            f"{', '.join(file.questions)[:200]}"
        )
    count = total * sum(len(file.schema.questions[name].options) for name in names)
    if count > MOST_PROBABILITIES:
        raise ValueError(
            f"{source.path}: has {total:,} rows, whose options would have {count:,} probabilities, "
            f"and {MOST_PROBABILITIES:,} are the most; some thousand rows suffice"
        )
    # Read apart, a question needs no other; jointly all are on the canvas, as they will be.
    every = file.schema.questions
    questions = every if args.joint else {name: every[name] for name in names}
    asking = Asking(file, questions, reading_of(args), args.seed, label_mass=False)
    model = generation.load(args)
    asking.check(model)
    labelled = {name: Labelled() for name in names}
    rows = request_rows(args, model, asking.ask, source.rows(), total)
    done, errors = _read(rows, asking, labelled)
    if done < total:
        return INTERRUPTED
    fitted, refusals = dict[str, Fitted](), list[str]()
    for name, read in labelled.items():
        try:
            fitted[name] = fit(read.rows, read.labels, args.folds, args.seed)
        except ValueError as error:  # a question that cannot be fitted
            refusals.append(f"{name}: {error}")
    warnings = [f"{source.path}:{error}" for error in errors[:MOST_ERRORS]]
    warnings += [f"and {len(errors) - MOST_ERRORS} other rows"] * (len(errors) > MOST_ERRORS)
    for text in [*warnings, *(refusals if fitted else [])]:
        terminal.print_message("warning", text)
    if not fitted:
        raise ValueError("; ".join(refusals))
    _store(args, asking, model.identity, path, fitted, labelled)
    # Without the probabilities of every row.
    figures = {
        name: {key: value for key, value in asdict(each).items() if key != "held_out"}
        for name, each in fitted.items()
    }
    terminal.print_report(args.json, figures, _lines(fitted, path))
    return 0


def _check_row(file: QuestionFile, row: Row) -> None:
    row_state(file, row.cells)
    for name, question in file.schema.questions.items():
        if name in row.cells:
            try:
                label_number(question, cell_text(row.cells[name]))
            except ValueError as error:
                raise ValueError(f"column {name!r}: {error}") from None


def _read(
    results: Iterable[Outcome[Row, Decided]], asking: Asking, labelled: Mapping[str, Labelled]
) -> tuple[int, list[str]]:
    """Adds the probabilities of every labelled question. Returns how many rows there were, and
    why some have none."""
    done, errors = 0, list[str]()
    for outcome in results:
        done += 1
        if outcome.result is None:
            errors.append(f"{outcome.row.line}: {outcome.error}")
            continue
        for name, into in labelled.items():
            text = cell_text(outcome.row.cells.get(name))
            number = label_number(asking.questions[name], text)
            if number is not None:
                into.labels.append(number)
                into.rows.append(outcome.result.answers[name].probabilities)
    return done, errors


def _store(
    args: argparse.Namespace,
    asking: Asking,
    model: ModelIdentity,
    path: Path,
    fitted: Mapping[str, Fitted],
    labelled: Mapping[str, Labelled],
) -> None:
    """The calibration, and its plot beside it."""
    made = datetime.now(UTC).date().isoformat()
    text = calibration_text(model, asking.reading, asking.questions, fitted, made)
    square = {name: (f, labelled[name].rows, labelled[name].labels) for name, f in fitted.items()}
    for target, content in ((path.with_suffix(".svg"), plot(square)), (path, text)):
        files.write(str(target), content, args.force, "name")


def _lines(fitted: Mapping[str, Fitted], path: Path) -> list[str]:
    """A table of the fits, and what to do with them."""
    rows: list[tuple[str, ...]] = [
        ("question", "labels", "T", "T of folds", "accuracy", "Brier", "ECE", "NLL")
    ]
    for name, each in fitted.items():
        folds = f"{min(each.fold_temperatures):.2f}-{max(each.fold_temperatures):.2f}"
        rows.append(
            (
                name,
                str(each.labels),
                f"{each.temperature:.2f}",
                folds,
                f"{each.before.accuracy:.1%}",
                *(
                    f"{getattr(each.before, key):.3f} → {getattr(each.after, key):.3f}"
                    for key in ("brier", "ece", "nll")
                ),
            )
        )
    out = ["before → after, on rows that the temperature was not fitted to:", *table(rows)]
    for name, each in fitted.items():
        if each.kept:
            out.append(f"{name}: T stays 1, since the fitted one did not lower the NLL held out")
        elif not LOWEST * 1.01 < each.temperature < HIGHEST * 0.99:
            out.append(f"{name}: T is at its bound; look at the labels before you use it")
    plotted = path.with_suffix(".svg")
    return [*out, f"stored in {path}; {plotted} shows it", f"use it: --calibration {path}"]
