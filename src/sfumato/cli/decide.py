"""`sfumato decide`: questions of a file about one text, or about every row of a table."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sfumato.cli import generation, interrupt, notes
from sfumato.cli.tables.asking import Asking, reading_of
from sfumato.cli.tables.columns import Columns, row_state
from sfumato.cli.tables.progress import progress
from sfumato.cli.tables.reads import outcomes, running
from sfumato.cli.tables.source import Row, Source, cell_text
from sfumato.cli.tables.summary import Summary, lines
from sfumato.cli.tables.target import Target
from sfumato.decisions.calibration import find_calibration
from sfumato.decisions.question_file import QuestionFile, read_questions
from sfumato.decisions.schema import Choice, Score, YesNo

INTERRUPTED = 130
MOST_STATE = 16 << 20  # characters of standard input


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
        state = sys.stdin.read(MOST_STATE + 1)
        if len(state) > MOST_STATE:
            raise ValueError(f"standard input has more than {MOST_STATE:,} characters")
    model, questions = generation.load(args), asking.file.questions
    decision = model.decide(state, questions, calibration=asking.calibration, **asking.options)
    if args.json:
        columns = Columns(_kinds(asking.file), True, asking.label_mass, asking.several)
        cells = columns.cells(decision, "", text=False)
        print(json.dumps(cells, indent=2, ensure_ascii=False))
    else:
        print(decision)
    return 0


def _kinds(file: QuestionFile) -> dict[str, str]:
    kinds = {YesNo: "yes/no", Choice: "choice", Score: "score"}
    return {name: kinds[type(each)] for name, each in file.questions.items()}


def _table(args: argparse.Namespace, asking: Asking) -> int:
    source = Source(args.table)
    # The whole table is checked before a model is loaded: a mistake in its last row shows now.
    total, columns = source.scan(lambda row: _check_row(asking.file, row))
    answers = Columns(_kinds(asking.file), args.probabilities, asking.label_mass, asking.several)
    names = answers.names(columns)
    if Path(args.out).suffix.lower() != ".jsonl":  # whose rows may have any keys
        names = [*columns, *names]
    _check_out(source.path, Path(args.out))
    with Target(args.out, names, _made(args, asking), args.force) as target:
        summary = Summary(asking.questions, target.count)
        rows = _rest(source, target, columns, total)
        ended = target.count == total or _decide(
            args, asking, _Job(rows, total, target, answers, summary)
        )
    figures = summary.figures()
    print(json.dumps(figures, indent=2) if args.json else "\n".join(lines(figures)))
    if not ended:
        done = target.count + summary.rows
        notes.print_message(
            "note", f"stopped after {done:,} of {total:,} rows; the same command goes on"
        )
        return INTERRUPTED
    return 0


def _check_row(file: QuestionFile, row: Row) -> None:
    row_state(file, row.cells)


def _check_out(table: Path, out: Path) -> None:
    if out.exists() and out.samefile(table):
        raise ValueError(f"--out: {out} is the table itself; name another file")
    if not out.parent.is_dir():
        raise ValueError(f"--out: {out}: its folder does not exist; make it first")


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


@dataclass(frozen=True)
class _Job:
    """Rows, and where their answers go."""

    rows: Iterator[Row]
    total: int
    target: Target
    answers: Columns
    summary: Summary


def _decide(args: argparse.Namespace, asking: Asking, job: _Job) -> bool:
    """Decides about the rows and writes them. False where Ctrl-C ended it."""
    model = generation.load(args)
    asking.check(model)
    text = job.target.path.suffix.lower() != ".jsonl"
    with (
        interrupt.counted() as presses,
        running(model, args.concurrency) as decider,
        progress(job.total, job.target.count) as show,
        job.summary.timed(),
    ):
        at_a_time = 2 * args.concurrency  # so that none of the engine's slots waits for this thread
        for outcome in outcomes(
            decider, job.rows, asking.request, at_a_time, lambda: presses.count > 0
        ):
            decided = outcome.decided
            decision = None if decided is None else asking.decision(decided, model.identity)
            cells = job.answers.cells(decision, outcome.error, text)
            job.target.append({**outcome.row.cells, **cells})
            job.summary.add(decision, outcome.error)
            show(job.summary.rows)
    return job.target.count + job.summary.rows == job.total
