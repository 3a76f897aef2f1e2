"""`sfumato decide`: questions of a file about one text, or about every row of a table."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.cli import generation, interrupt, notes
from sfumato.cli.tables.columns import Columns, row_state
from sfumato.cli.tables.progress import progress
from sfumato.cli.tables.reads import outcomes, running
from sfumato.cli.tables.source import Row, Source, cell_text
from sfumato.cli.tables.summary import Summary, lines
from sfumato.cli.tables.target import Target
from sfumato.decisions.calibration import Calibration, Reading, find_calibration
from sfumato.decisions.kinds import Choice, YesNo
from sfumato.decisions.question_file import QuestionFile, read_questions
from sfumato.decisions.results import Decision, Usage
from sfumato.engine.decision import Decided, DecisionRequest

if TYPE_CHECKING:
    from sfumato.api import Model

INTERRUPTED = 130
MOST_STATE = 16 << 20  # characters of standard input


def main(args: argparse.Namespace) -> int:
    """Decide, and print. Raises ValueError or OSError for bad input."""
    if (args.table is None) == (args.state is None):
        raise ValueError("give a table, or a text with --state, and not both")
    if (args.table is None) != (args.out is None):
        raise ValueError("--out names the file for the answers to a table; give both or none")
    file = read_questions(args.questions)
    calibration = args.calibration and find_calibration(file.path, args.calibration)
    if args.state is not None:
        return _one(args, file, calibration)
    return _table(args, file, calibration)


def reading(args: argparse.Namespace) -> Reading:
    """How the options say that questions are read."""
    return Reading(args.samples, args.orders, args.order, args.steps, args.joint)


def request(args: argparse.Namespace, file: QuestionFile, state: str) -> DecisionRequest:
    """The request about one state."""
    return DecisionRequest(
        state,
        file.schema.questions,
        seed=args.seed,
        label_mass=not getattr(args, "no_label_mass", False),
        **asdict(reading(args)),
    )


def _one(args: argparse.Namespace, file: QuestionFile, calibration: Calibration | None) -> int:
    """One state: bars, or an object of JSON."""
    state = args.state
    if state == "-":
        state = sys.stdin.read(MOST_STATE + 1)
        if len(state) > MOST_STATE:
            raise ValueError(f"standard input has more than {MOST_STATE:,} characters")
    model = generation.load(args)
    decision = model.decide(
        state,
        file.questions,
        seed=args.seed,
        label_mass=not args.no_label_mass,
        calibration=calibration,
        **asdict(reading(args)),
    )
    if args.json:
        cells = Columns(_kinds(file), True, True, True).cells(decision, "", text=False)
        print(json.dumps(cells, indent=2, ensure_ascii=False))
    else:
        print(decision)
    return 0


def _kinds(file: QuestionFile) -> dict[str, str]:
    return {
        name: "yes/no"
        if isinstance(each, YesNo)
        else "choice"
        if isinstance(each, Choice)
        else "score"
        for name, each in file.questions.items()
    }


def _table(args: argparse.Namespace, file: QuestionFile, calibration: Calibration | None) -> int:
    source = Source(args.table)
    # The whole table is checked before a model is loaded: a mistake in its last row shows now.
    total, columns = source.scan(lambda row: _check_row(file, row))
    how = reading(args)
    several = how.samples != 1 or how.orders > 1
    answers = Columns(_kinds(file), args.probabilities, not args.no_label_mass, several)
    names = [*columns, *answers.names(columns)]
    _check_other_file(source.path, Path(args.out))
    with Target(args.out, names, _made(args, file, calibration), args.force) as target:
        summary = Summary(file.questions, target.count)
        rows = _rest(source, target, columns, total)
        ended = not target.count < total or _decide(
            args, file, calibration, rows, total, target, answers, summary
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


def _check_other_file(table: Path, out: Path) -> None:
    if out.exists() and out.samefile(table):
        raise ValueError(f"--out: {out} is the table itself; name another file")


def _made(
    args: argparse.Namespace, file: QuestionFile, calibration: Calibration | None
) -> dict[str, Any]:
    """What decides the answers besides the rows, as plain values: two runs that agree in it may
    write one file."""
    text = json.dumps([repr(file.questions), file.state and file.state.text])
    return {
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        "model": args.model or "embedded",
        **{key: getattr(args, key) for key in ("dtype", "activations", "quantize")},
        "calibration": calibration and repr(sorted(calibration.questions.items())),
        "seed": args.seed,
        **asdict(reading(args)),
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


def _decide(
    args: argparse.Namespace,
    file: QuestionFile,
    calibration: Calibration | None,
    rows: Iterator[Row],
    total: int,
    target: Target,
    answers: Columns,
    summary: Summary,
) -> bool:
    """Decides about the rows and writes them. False where Ctrl-C ended it."""
    model = generation.load(args)
    if calibration is not None:
        calibration.check(file.schema.questions, model.path.name, reading(args))
    text = target.path.suffix.lower() != ".jsonl"
    with (
        interrupt.counted() as presses,
        running(model, args.concurrency) as decider,
        progress(total, target.count) as show,
        summary.timed(),
    ):
        for outcome in outcomes(
            decider,
            rows,
            lambda row: request(args, file, row_state(file, row.cells)),
            2 * args.concurrency,
            lambda: presses.count > 0,
        ):
            decision = None
            if outcome.decided is not None:
                decision = typed(model, file, calibration, reading(args), outcome.decided)
            cells = answers.cells(decision, outcome.error, text)
            target.append({**outcome.row.cells, **cells})
            summary.add(decision, outcome.error)
            show(summary.rows)
        return presses.count == 0


def typed(
    model: Model,
    file: QuestionFile,
    calibration: Calibration | None,
    how: Reading,
    decided: Decided,
) -> Decision[dict[str, Any]]:
    """The typed answers of an engine's, calibrated where a calibration is given."""
    schema, answers = file.schema, decided.answers
    if calibration is not None:
        answers = calibration.apply(answers, schema.questions, model.path.name, how)
    usage = decided.usage
    return schema.decision(answers, Usage(usage.input_tokens, usage.cached_tokens, usage.reads))
