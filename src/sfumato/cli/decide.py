"""`sfumato decide`: questions of a file about one text, or about every row of a table."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sfumato.cli import INTERRUPTED, files, generation, terminal
from sfumato.cli.answers import Asking, ask_rows, reading_of, row_state
from sfumato.cli.rows import Row, Source, Target, cell_text
from sfumato.cli.terminal import table
from sfumato.decisions.calibration import find_calibration
from sfumato.decisions.question_file import read_questions
from sfumato.decisions.results import Decision, TypedAnswer, shown
from sfumato.refused import Refused

MOST_REASONS = 100  # that are told apart
SHOWN_REASONS, SHOWN_OPTIONS = 5, 12
LEAST_MASS = 0.5  # of a mean label mass, below which the summary has a note


def main(args: argparse.Namespace) -> int:
    """Decide, and print. Raises ValueError or OSError for bad input."""
    if (args.table is None) == (args.state is None):
        raise ValueError("give a table, or a text with --state, and not both")
    if (args.table is None) != (args.out is None):
        raise ValueError("--out names the file for the answers to a table; give both or none")
    file = read_questions(args.questions)
    calibration = find_calibration(file.path, args.calibration) if args.calibration else None
    mass = not args.no_label_mass
    asking = Asking(file, file.schema.questions, reading_of(args), args.seed, mass, calibration)
    return _table(args, asking) if args.state is None else _one(args, asking)


def _one(args: argparse.Namespace, asking: Asking) -> int:
    """One state: bars, or an object of JSON."""
    state = args.state
    if state == "-":
        state = files.read_text("-")
    model, questions = generation.load(args), asking.file.questions
    decision = model.decide(state, questions, calibration=asking.calibration, **asking.options)
    if args.json:
        cells = asking.columns(probabilities=True).cells(decision, "")
        terminal.print_json(cells)
    else:
        print(decision)
    return 0


def _table(args: argparse.Namespace, asking: Asking) -> int:
    source = Source(args.table)
    # The whole table is checked before a model is loaded: a mistake in its last row shows now.
    total, columns = source.scan(lambda row: row_state(asking.file, row.cells))
    answers = asking.columns(args.probabilities)
    names = answers.names(columns)
    if Path(args.out).suffix.lower() != ".jsonl":  # whose rows may have any keys
        names = [*columns, *names]
    _check_out(source.path, Path(args.out))
    with Target(args.out, names, _made(args, asking), args.force) as target:
        summary = Summary(asking.questions, target.count)
        rows = _rest(source, target, columns, total)
        if target.count < total:
            model = generation.load(args)
            asking.check(model)
            began = time.perf_counter()
            for outcome in ask_rows(args, asking, model, rows, total, target.count):
                decided = outcome.decided
                decision = None if decided is None else asking.decision(decided, model.identity)
                target.append({**outcome.row.cells, **answers.cells(decision, outcome.error)})
                summary.add(decision, outcome.error)
            summary.seconds = time.perf_counter() - began
    figures = summary.figures()
    terminal.print_report(args.json, figures, lines(figures))
    done = target.count + summary.rows
    if done < total:
        terminal.print_message(
            "note", f"stopped after {done:,} of {total:,} rows; the same command goes on"
        )
        return INTERRUPTED
    return 0


def _check_out(table: Path, out: Path) -> None:
    if out.exists() and out.samefile(table):
        raise Refused("out", f"{out} is the table itself", "name another file")
    if not out.parent.is_dir():
        raise Refused("out", f"{out}: its folder does not exist", "make it first")


def _made(args: argparse.Namespace, asking: Asking) -> dict[str, Any]:
    """What decides the answers besides the rows, as plain values: two runs that agree in it may
    write one file."""
    file, calibration = asking.file, asking.calibration
    text = json.dumps([repr(file.questions), file.state and file.state.text])
    return {
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        "model": args.model or "embedded",
        "weights": generation.weights_of(args),
        **{key: getattr(args, key) for key in ("dtype", "activations", "quantize", "cache_type")},
        "calibration": calibration and repr(sorted(calibration.questions.items())),
        **asking.options,
    }


def _rest(source: Source, target: Target, columns: list[str], total: int) -> Iterator[Row]:
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

    def add(self, answer: TypedAnswer) -> None:
        self.answers[shown(answer.value)] += 1
        self.confidence += answer.confidence
        if answer.label_mass is not None:
            self.label_mass += answer.label_mass
            self.masses += 1

    def figures(self) -> dict[str, Any]:
        count = self.answers.total()
        return {
            "answers": dict(self.answers.most_common()),
            "mean_confidence": self.confidence / count if count else None,
            "mean_label_mass": self.label_mass / self.masses if self.masses else None,
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
        rows.append((name, confidence, mass, ", ".join(counts)))
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
