"""Questions with known answers: what a task of a file is, whether a reply is right, and what a run
comes to, as figures, a table and a picture.

A reply is right where it has one of the task's answers in it, as whole words whatever their case,
accents and punctuation, or where the task's own check says so. Knows no model and no file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from sfumato.api import Reply
from sfumato.svg import Point, curves

FACTS = Path(__file__).with_name("facts.jsonl")
"""60 short questions about well-known facts, which come with the package."""

MOST_TASKS = 100_000  # of a file
MOST_QUESTION, MOST_ANSWER, MOST_CHECK = 100_000, 1_000, 4_000  # characters
MOST_ANSWERS = 100  # of a task
CHECK_S, CHECK_BYTES = 10, 1 << 30  # of a check: seconds, and memory
MOST_NOTE = 200  # characters

RIGHT, WRONG, ABSTAINED, FAILED = OUTCOMES = ("right", "wrong", "abstained", "failed")

_HAN = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces: each sign is a word
_WORD = re.compile(rf"[{_HAN}]|\d+(?:[.,]\d+)*|[^\W_{_HAN}]+")
_GROUPS = re.compile(r",(?=\d{3}(?!\d))")
_NOT_KNOWN = (
    *("i do not know", "i don t know", "i am not sure", "i m not sure"),
    *("i cannot answer", "i can t answer", "i am unable to answer"),
)
"""Words of replies that answer nothing, as `words` gives them."""


@dataclass(frozen=True)
class AskedTask:
    """A question, and the answers that are right or the code that says whether one is."""

    question: str
    answers: tuple[str, ...] = ()
    check: str | None = None  # lines of Python; see `run_check`


def task_of(cells: Mapping[str, Any]) -> AskedTask:
    """The task of a row: a question, and either answers, one text or several, or a check. Raises
    ValueError, naming the key."""
    known = [each.name for each in fields(AskedTask)]
    for key in cells:
        if key not in known:
            (near,) = get_close_matches(key, known, 1, 0.0)
            raise ValueError(f"unknown key {key!r:.80}; the nearest is {near!r}")
    question = _text("question", cells.get("question"), MOST_QUESTION)
    given, check = cells.get("answers"), cells.get("check")
    if (given is None) == (check is None):
        raise ValueError("must have answers or a check, and not both")
    if check is not None:
        return AskedTask(question, check=_compiled(_text("check", check, MOST_CHECK)))
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not 1 <= len(answers) <= MOST_ANSWERS:
        raise ValueError(f"answers must be a text, or a list of 1 to {MOST_ANSWERS} texts")
    for answer in answers:
        if not words(_text("answers", answer, MOST_ANSWER)):
            raise ValueError(f"answers: {answer!r:.80} has no letter and no digit; write a check")
    return AskedTask(question, tuple(answers))


def _text(key: str, value: Any, most: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not empty, got {value!r:.80}")
    if len(value) > most:
        raise ValueError(f"{key} has {len(value):,} characters, and {most:,} are the most")
    return value


def _compiled(check: str) -> str:
    """The check, which is Python. Raises ValueError, naming the line of the check."""
    try:
        compile(check, "check", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"check: is not Python: {error}"[:MOST_NOTE]) from None
    return check


def words(text: str) -> str:
    """The words and numbers of a text between single spaces, in small letters, without accents; a
    number without the commas between its thousands."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(each for each in plain if not unicodedata.combining(each))
    return " ".join(_GROUPS.sub("", word) for word in _WORD.findall(plain))


class Verdict(NamedTuple):
    """The outcome of a task, and why where it is no plain one."""

    outcome: str  # one of OUTCOMES
    note: str = ""


def verdict(task: AskedTask, reply: Reply) -> Verdict:
    """Whether the reply is right. An empty one, one that the second reader leaves undecided, and
    one that says that it does not know abstain; the thought does not count."""
    text = words(reply.text)
    if not reply.text.strip():
        return Verdict(ABSTAINED)
    if reply.verification is not None and reply.verification.undecided:
        return Verdict(ABSTAINED, "undecided")
    if task.check is not None:
        return run_check(task.check, reply.text)
    if any(_has(text, words(answer)) for answer in task.answers):
        return Verdict(RIGHT)
    return Verdict(ABSTAINED if any(_has(text, each) for each in _NOT_KNOWN) else WRONG)


def _has(text: str, part: str) -> bool:
    return f" {part} " in f" {text} "


_RUNNER = """
import ast, contextlib, json, os, resource, sys
for what, most in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}),
                   (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0)):
    with contextlib.suppress(ValueError, OSError):  # macOS has not all of them
        resource.setrlimit(what, (most, most))
check, answer = json.load(sys.stdin)
names = {{"answer": answer, "right": None}}
try:
    tree = ast.parse(check)
    if isinstance(tree.body[-1], ast.Expr):  # its value is the verdict
        tree.body[-1] = ast.copy_location(
            ast.Assign([ast.Name("right", ast.Store())], tree.body[-1].value), tree.body[-1])
        ast.fix_missing_locations(tree)
    exec(compile(tree, "check", "exec"), names)
    right = bool(names["right"])
except BaseException as error:
    sys.stderr.write(f"{{type(error).__name__}}: {{error}}"[:{note}])
    sys.stderr.flush()
    os._exit({raised})
os._exit({right} if right else {wrong})
"""
_EXITS = {"right": 10, "wrong": 11, "raised": 12}
_PROGRAM = _RUNNER.format(seconds=CHECK_S, memory=CHECK_BYTES, note=MOST_NOTE, **_EXITS)


def run_check(check: str, answer: str) -> Verdict:
    """Runs a check on an answer: the code has the text as `answer`, and sets `right` or ends in an
    expression that is true for a right one. A check that raises says wrong, with the error as
    the note; one that takes more than CHECK_S seconds fails.

    The code runs in a process of its own, with Python's standard library, an empty environment and
    bounds on its time and memory. That ends an endless loop; it is no protection against code that
    means harm."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=folder,
            env={},
            start_new_session=True,  # what it starts ends with it, where it takes too long
        )
        try:
            process.communicate(json.dumps([check, answer]).encode(), timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            return Verdict(FAILED, f"its check took longer than {CHECK_S} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        errors.seek(0)
        note = " ".join(errors.read(MOST_NOTE).decode(errors="replace").split())
    code = process.returncode
    if code == _EXITS["right"]:
        return Verdict(RIGHT)
    if code in (_EXITS["wrong"], _EXITS["raised"]):
        return Verdict(WRONG, f"its check raised {note}" if code == _EXITS["raised"] else "")
    return Verdict(FAILED, f"its check ended with {code}: {note}"[:MOST_NOTE])


@dataclass(frozen=True)
class Answered:
    """A task with its reply, as a row of the file of answers has it."""

    task: int  # its number, from 1
    max_steps: int | None  # of a canvas; None: the checkpoint's
    question: str
    answer: str
    outcome: str
    note: str = ""
    forwards: int = 0  # denoising steps of all canvases
    canvases: int = 0
    tokens: int = 0  # visible ones
    seconds: float = 0.0  # of the task, without its wait in the queue


def answered_of(cells: Mapping[str, Any]) -> Answered:
    """The row of these plain values. Raises ValueError for what is no `Answered` as a dict."""
    counts = ("task", "forwards", "canvases", "tokens")
    try:
        row = Answered(**cells)
        good = all(type(cells[key]) is int and cells[key] >= 0 for key in counts)
        good = good and isinstance(row.question, str) and isinstance(row.answer, str)
        if good and row.outcome in OUTCOMES and math.isfinite(row.seconds):
            return row
    except (KeyError, TypeError):
        pass
    raise ValueError("is no row of answers")


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: right of count, which is 1 or more."""
    z = statistics.NormalDist().inv_cdf(0.975)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def figures(rows: Sequence[Answered]) -> list[dict[str, Any]]:
    """The figures of the rows, as plain values, for each number of steps in their order."""
    return [
        {"max_steps": most, **_figures([row for row in rows if row.max_steps == most])}
        for most in dict.fromkeys(row.max_steps for row in rows)
    ]


def _figures(rows: Sequence[Answered]) -> dict[str, Any]:
    counts = {each: sum(row.outcome == each for row in rows) for each in OUTCOMES}
    low, high = interval(counts[RIGHT], len(rows))
    forwards, canvases = sum(row.forwards for row in rows), sum(row.canvases for row in rows)
    seconds = [row.seconds for row in rows]
    return {
        "tasks": len(rows),
        **counts,
        "right_share": counts[RIGHT] / len(rows),
        "right_low": low,
        "right_high": high,
        "forwards": forwards,
        "forwards_per_task": forwards / len(rows),
        "forwards_per_canvas": forwards / canvases if canvases else None,
        "tokens_per_forward": sum(row.tokens for row in rows) / forwards if forwards else None,
        "seconds": sum(seconds),
        "seconds_p50": statistics.median(seconds),
    }


def to_table(summaries: Iterable[Mapping[str, Any]]) -> Table:
    """The figures for people: a column for each number of steps, since terminals are narrow."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    columns = [
        (
            "own" if each["max_steps"] is None else f"{each['max_steps']:,}",
            f"{each['tasks']:,}",
            *(f"{each[name]:,}" for name in OUTCOMES),
            f"{each['right_share']:.0%}",
            f"{each['right_low']:.0%}-{each['right_high']:.0%}",
            f"{each['forwards_per_task']:.2f}",
            f"{each['seconds_p50']:.3g}",
        )
        for each in summaries
    ]
    heads = ("steps", "tasks", *OUTCOMES, "share right", "95 % interval", "forwards", "seconds")
    for row in zip(heads, *columns, strict=True):
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    return table


def plot(summaries: Sequence[Mapping[str, Any]], name: str) -> str:
    """An SVG of right answers against forwards, with their intervals. name: of the curve."""
    points = sorted(
        Point(
            each["forwards_per_task"],
            each["right_share"],
            each["right_low"],
            each["right_high"],
            f"steps {each['max_steps'] or 'own'}: {each['right']} of {each['tasks']} right",
        )
        for each in summaries
    )
    return curves({name: points}, "forwards a task", "share of right answers", top=1.0)
