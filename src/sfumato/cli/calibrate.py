"""`sfumato calibrate`: fits a temperature for each question to a table of labelled states."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sfumato.cli import INTERRUPTED, files, generation, terminal
from sfumato.cli.answers import Asking, Outcome, ask_rows, label_number, reading_of, row_state
from sfumato.cli.rows import Row, Source, cell_text
from sfumato.cli.terminal import table
from sfumato.decisions.calibration import ModelIdentity, calibration_path, calibration_text
from sfumato.decisions.fit import HIGHEST, LOWEST, Fitted, fit, plot
from sfumato.decisions.question_file import QuestionFile, read_questions
from sfumato.refused import Refused

MOST_PROBABILITIES = 2_000_000  # of all rows, questions and options: fitting them takes a minute
MOST_ERRORS = 5  # of rows, that are shown
_NAME = "letters, digits, - and _"


@dataclass
class Labelled:
    """What one question's labelled rows have been read as."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def main(args: argparse.Namespace) -> int:
    """Read, fit, store and print. Raises ValueError or OSError for bad input."""
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
    done, errors = _read(ask_rows(args, asking, model, source.rows(), total), asking, labelled)
    if done < total:
        return INTERRUPTED
    fitted, refusals = _fit(args, labelled)
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
    results: Iterable[Outcome[Row]], asking: Asking, labelled: Mapping[str, Labelled]
) -> tuple[int, list[str]]:
    """Adds the probabilities of every labelled question. Returns how many rows there were, and
    why some have none."""
    done, errors = 0, list[str]()
    for outcome in results:
        done += 1
        if outcome.decided is None:
            errors.append(f"{outcome.row.line}: {outcome.error}")
            continue
        for name, into in labelled.items():
            text = cell_text(outcome.row.cells.get(name))
            number = label_number(asking.questions[name], text)
            if number is not None:
                into.labels.append(number)
                into.rows.append(outcome.decided.answers[name].probabilities)
    return done, errors


def _fit(
    args: argparse.Namespace, labelled: Mapping[str, Labelled]
) -> tuple[dict[str, Fitted], list[str]]:
    """The fit of each question that can be fitted, and why others cannot."""
    fitted, refusals = {}, []
    for name, each in labelled.items():
        try:
            fitted[name] = fit(each.rows, each.labels, args.folds, args.seed)
        except ValueError as error:
            refusals.append(f"{name}: {error}")
    return fitted, refusals


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
