"""`sfumato eval`: how many tasks a model does right, of a file of questions with answers, or the
held-out ones of the packaged models' recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import sfumato
from sfumato.api import Reply
from sfumato.bench import answers
from sfumato.bench.answers import FACTS, MOST_TASKS, Answered, AskedTask, answered_of
from sfumato.bench.environment import environment
from sfumato.cli import INTERRUPTED, files, generation, terminal
from sfumato.cli.arguments import COMMAND_LINE, origin_of, sampler_options
from sfumato.cli.rows import Outcome, request_rows
from sfumato.diffusion.sampler_config import check_sampler
from sfumato.engine import Engine, Finished, Handle, Request, new_id
from sfumato.options import LAST_SEED, exclusions
from sfumato.refused import Refused

EVERY_S = 10.0  # between two lines of progress, where there is no terminal
COUNT = 200  # held-out tasks of each set, where no option says
SHOWN = 5  # wrong answers, and notes, that people see
_WIDTH = 60  # characters of each of them
_OF_TASKS = (
    *("curves", "out", "plot", "force", "allow_code", "timeout", "concurrency"),
    *("system", "thinking", "max_tokens", "stop", "adapter", "verify"),
)
"""Options that held-out tasks do not have."""


def main(args: argparse.Namespace) -> int:
    """Ask, judge and report. Raises ValueError or OSError for bad input."""
    if args.tasks is not None:
        return _ask(args)
    for key in _OF_TASKS:
        if origin_of(args, key).rank == COMMAND_LINE:
            raise Refused(key, "belongs to --tasks", "name a file of tasks, or leave it out")
    return _held_out(args)


def _held_out(args: argparse.Namespace) -> int:
    from sfumato.bench import evaluate

    config = sfumato.SamplerConfig().options(**sampler_options(args))
    model = generation.load(args)
    with terminal.progress("answering tasks", every_s=EVERY_S) as progress:
        figures = evaluate.run(
            model, count=args.count or COUNT, seed=args.seed, config=config, progress=progress
        )
    terminal.print_report(args.json, figures, [evaluate.table(figures)])
    return 0


class Question(NamedTuple):
    """One request of a run."""

    number: int  # of the task, from 1
    max_steps: int | None  # None: the checkpoint's
    task: AskedTask

    def agrees(self, row: Answered) -> bool:
        """Whether the row is of this request."""
        mine = self.number, self.max_steps, self.task.question
        return mine == (row.task, row.max_steps, row.question)


def _ask(args: argparse.Namespace) -> int:
    tasks = _tasks(args)
    steps = list(dict.fromkeys(args.curves)) if args.curves else [args.steps]
    given = {"--curves": args.curves, "--steps": args.steps}
    exclusions.check(exclusions.EVAL, given)
    plan = [Question(n, most, task) for most in steps for n, task in enumerate(tasks, 1)]
    requests = [_request(args, question) for question in plan]
    made, rows = _made(args, tasks, steps), list[Answered]()
    if args.plot:
        files.check(args.plot, args.force, "plot")
    with ExitStack() as stack:
        target = None if args.out is None else stack.enter_context(_target(args, made))
        if target is not None:
            rows += _earlier(target, plan)
        if len(rows) < len(plan):
            model = generation.load(args)
            left = list(zip(plan, requests, strict=True))[len(rows) :]
            # No request waits for another, so that its time limit is its own.
            done = len(rows)
            for outcome in request_rows(
                args, model, _submit, left, len(plan), done, "asking tasks", 1
            ):
                row = _row(outcome)
                if target is not None:
                    target.append(asdict(row))
                rows.append(row)
    _report(args, made, rows, len(plan))
    return 0 if len(rows) == len(plan) else INTERRUPTED


def _tasks(args: argparse.Namespace) -> list[AskedTask]:
    """All tasks of the file that are asked. Raises ValueError, naming the line of a wrong one, and
    OSError."""
    is_packaged = args.tasks == "facts" and not Path(args.tasks).exists()
    source, tasks = files.Source(FACTS if is_packaged else args.tasks), list[AskedTask]()

    def take(row: files.Row) -> None:
        if len(tasks) == MOST_TASKS:
            raise ValueError(f"with it there are over {MOST_TASKS:,} tasks")
        tasks.append(answers.task_of(row.cells))

    source.scan(take)
    tasks = tasks[: args.count]
    if not args.allow_code and any(task.check is not None for task in tasks):
        raise ValueError(
            f"{source.path}: has checks, which are Python code that would run with your rights; "
            "read them, and allow them with --allow-code"
        )
    return tasks


def _request(args: argparse.Namespace, question: Question) -> Request:
    """The request of a task, with noise of its own. Raises Refused for a wrong option."""
    messages = [*generation.opening(args), {"role": "user", "content": question.task.question}]
    made = generation.request(args, messages, timeout_s=args.timeout or None, endpoint="eval")
    config = made.sampler or sfumato.SamplerConfig()
    if question.max_steps is not None:
        config = replace(config, max_steps=question.max_steps)
    check_sampler(config)
    seed = (args.seed + question.number - 1) % (LAST_SEED + 1)
    return replace(made, sampler=config, seed=seed, drafts=False)


def _made(
    args: argparse.Namespace, tasks: Sequence[AskedTask], steps: Sequence[int | None]
) -> dict[str, Any]:
    """All that the answers depend on, as plain values: runs that agree in it may write one file."""
    text = repr([asdict(task) for task in tasks])
    config = sfumato.SamplerConfig().options(**sampler_options(args))
    keys = ("max_tokens", "thinking", "stop", "system", "seed", "timeout", "verify")
    return {
        "command": "eval",
        "tasks": hashlib.sha256(text.encode()).hexdigest(),
        **generation.loaded_as(args),
        **{key: getattr(args, key) for key in keys},
        "steps": list(steps),
        "sampler": repr(replace(config, max_steps=None)),
    }


def _target(args: argparse.Namespace, made: dict[str, Any]) -> files.Target:
    """The file of answers. Raises ValueError or OSError where it cannot be written."""
    out = Path(args.out)
    if files.delimiter_of(out) is not None:
        raise Refused("out", f"{out}: must end in .jsonl")
    if out.exists() and Path(args.tasks).exists() and out.samefile(args.tasks):
        raise Refused("out", f"{out} is the file of tasks", "name another file")
    if not out.parent.is_dir():
        raise Refused("out", f"{out}: its folder does not exist", "make it first")
    return files.Target(out, [], made, args.force)


def _earlier(target: files.Target, plan: Sequence[Question]) -> list[Answered]:
    """The rows that the target has. Raises ValueError where they are not the first of the plan."""
    source = files.Source(target.path, files.MOST_OWN_ROW)
    try:
        rows = [answered_of(row.cells) for row in source.rows()] if target.count else []
        if len(rows) > len(plan) or not all(map(Question.agrees, plan, rows)):
            raise ValueError("has rows of other tasks")
    except ValueError as error:
        advice = "name another file with --out, or replace it with --force"
        raise ValueError(f"{target.path}: {error}; {advice}") from None
    return rows


def _submit(engine: Engine, one: tuple[Question, Request]) -> Handle[Reply]:
    # A request has its identity, and its time, from its submission on.
    return engine.submit(replace(one[1], id=new_id()))


def _row(outcome: Outcome[tuple[Question, Request], Reply]) -> Answered:
    """The row of a task that has its reply, or has failed."""
    (number, most, task), _ = outcome.row
    end = None if outcome.handle is None else outcome.handle.terminal
    if outcome.result is None or not isinstance(end, Finished):
        note = outcome.error[: answers.MOST_NOTE]
        return Answered(number, most, task.question, "", answers.FAILED, note)
    reply, account = outcome.result, end.account
    verdict = answers.verdict(task, reply)
    return Answered(
        number,
        most,
        task.question,
        reply.text,
        verdict.outcome,
        verdict.note,
        forwards=sum(account.steps),
        canvases=len(account.steps),
        tokens=account.output_tokens,
        seconds=round(account.total_s - account.queue_s, 6),
    )


def _report(
    args: argparse.Namespace, made: dict[str, Any], rows: Sequence[Answered], total: int
) -> None:
    """The figures, as JSON or a table with some wrong answers, and the plot."""
    summaries = answers.figures(rows)
    if args.plot and summaries:
        picture = answers.plot(summaries, Path(args.model or "embedded").name)
        files.write(args.plot, picture, args.force, "plot")
    if args.json:
        report = {"benchmark": "sfumato eval", **environment(), "made": made}
        terminal.print_json({**report, "of": total, "figures": summaries})
    elif summaries:
        Console(highlight=False, markup=False).print(answers.to_table(summaries))
        terminal.print_lines(_examples(rows), sys.stdout)
    if len(rows) < total:
        goes_on = "the same command goes on" if args.out else "a file of --out is taken up"
        text = f"stopped after {len(rows):,} of {total:,} tasks; {goes_on}"
        terminal.print_message("note", text)


def _examples(rows: Sequence[Answered]) -> Iterator[str]:
    """Some wrong answers, and why tasks failed or checks raised."""
    wrong = [row for row in rows if row.outcome == answers.WRONG]
    for row in wrong[:SHOWN]:
        yield f"wrong: {_cut(row.question)} → {_cut(row.answer)}"
    if len(wrong) > SHOWN:
        yield f"and {len(wrong) - SHOWN:,} other wrong ones; --out FILE.jsonl has all"
    notes = dict.fromkeys(row.note for row in rows if row.note)
    yield from (f"note: {note}" for note in list(notes)[:SHOWN])


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
