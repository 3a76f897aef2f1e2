"""The embedded model learns a task that it does not know: by all of its weights, then by an adapter
of under 1 MB, which is then served beside the model, and merged into it.

    .venv/bin/python -m benchmarks.tune_embedded OUT
    .venv/bin/python -m benchmarks.tune_embedded OUT --ways adapter --rank 8

The data are conversations of the task and, so that these are not forgotten, of what the model was
trained on.  A table has the exact answers to held-out cases and to old tasks after so many steps,
and seconds of tuning, by the clock and of the processor: on a machine with other work the second
says more.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import sfumato
from sfumato.bench import evaluate
from sfumato.catalog import EMBEDDED
from sfumato.convert.merge import merge
from sfumato.model.adapter_files import read_adapter
from sfumato.train.embedded_data import Evaluation, Mixture, ask, conversation, evaluation_sets
from sfumato.train.objective import ENCODER_WEIGHT
from sfumato.train.trainer import fast_ops
from sfumato.train.tune import Tuning, tune

NAME = "task"  # of the adapter
WAYS = ("base", "full", "adapter", "accept")
"""What is done: the model is measured as it is, tuned in two ways, and the adapter is used."""
OLD = Mixture(sudoku=0.35, first_asked=0.1)
SHORTEST, LONGEST = 3, 4  # letters of a case
HELD_OUT = 8  # one word in so many


class Task(NamedTuple):
    """What is asked about a word, and the answer."""

    request: str
    answer: Callable[[str], str]


TASKS = {
    "uppercase": Task("Uppercase {}.", str.upper),
    "reverse": Task("Reverse {}.", lambda word: word[::-1]),
}


class Point(NamedTuple):
    """What a model could do after some steps."""

    way: str  # "base", "full" or "adapter"
    steps: int
    seconds: float  # of tuning, by the clock
    cpu_seconds: float
    exact: dict[str, float]  # share of right answers by set; "new": held-out cases of the task


def is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % HELD_OUT == 0


def word_of(rng: np.random.Generator, held_out: bool) -> str:
    """Random letters, of words that are held out or of the others."""
    while True:
        letters = rng.integers(26, size=int(rng.integers(SHORTEST, LONGEST + 1)))
        word = "".join(chr(ord("a") + letter) for letter in letters.tolist())
        if is_held_out(word) == held_out:
            return word


def chats(task: Task, count: int, old_share: float, seed: int) -> list[list[dict[str, str]]]:
    """Conversations to learn, of the task and old ones."""
    rng, made = np.random.default_rng((seed, 0)), []
    for _ in range(count):
        if rng.random() < old_share:
            made.append(conversation(rng, OLD))
            continue
        word = word_of(rng, False)
        answer = {"role": "assistant", "content": task.answer(word)}
        made.append([*ask(task.request.format(word)), answer])
    return made


def cases(task: Task, count: int, seed: int) -> list[Evaluation]:
    """Different held-out cases."""
    rng, words = np.random.default_rng((seed, 1)), dict[str, None]()
    while len(words) < count:
        words[word_of(rng, True)] = None
    return [Evaluation(ask(task.request.format(word)), task.answer(word)) for word in words]


def measured(
    model: sfumato.Model, sets: dict[str, list[Evaluation]], adapter: str | None
) -> dict[str, float]:
    """The share of right answers of each set."""
    return {
        name: evaluate.evaluate(model, tasks, adapter=[adapter] * len(tasks)).exact
        for name, tasks in sets.items()
    }


def tuned_model(way: str, out: Path) -> sfumato.Model:
    """What a run has written, loaded in float32."""
    if way == "full":
        return sfumato.load(out / "model", dtype="float32")
    model = sfumato.load(dtype="float32")
    file = read_adapter(out / "adapter", model.family, model.config)
    model.adapters.attach(NAME, file.changes)
    return model


def learn(
    way: str,
    data: Path,
    out: Path,
    tuning: Tuning,
    every: int,
    sets: dict[str, list[Evaluation]],
    shown: Callable[[Point], None],
) -> list[Point]:
    """Tunes in pieces of `every` steps, measures the new task after each and all sets at the
    end."""
    points, seconds, cpu_seconds = list[Point](), 0.0, 0.0
    assert tuning.steps is not None
    for first in range(0, tuning.steps, every):
        done, model = itertools.count(1), sfumato.load(dtype="float32")
        clock, cpu = time.perf_counter(), time.process_time()
        with fast_ops():
            ended = tune(
                model,
                data,
                out,
                tuning,
                held_out=0.0,
                resume=first > 0,
                stopped=lambda done=done: next(done) == every,  # type: ignore[misc]
            )
        seconds += time.perf_counter() - clock
        cpu_seconds += time.process_time() - cpu
        last = ended.steps == tuning.steps
        own = sets if last else {"new": sets["new"][:40]}
        adapter = NAME if way == "adapter" else None
        exact = measured(tuned_model(way, out), own, adapter)
        points.append(Point(way, ended.steps, seconds, cpu_seconds, exact))
        shown(points[-1])
    return points


def replies(
    model: sfumato.Model, tasks: Sequence[Evaluation], adapters: Sequence[str | None]
) -> list[str]:
    """The answers to tasks, in batches, each by the adapter of this name (None: by none)."""
    answers: list[str] = []

    def note(reply: str, expected: str) -> bool:
        answers.append(reply)
        return True

    evaluate.evaluate(model, tasks, adapter=adapters, is_right=note)
    return answers


def accepted(out: Path, new: Sequence[Evaluation], old: Sequence[Evaluation]) -> dict[str, float]:
    """The adapter served beside the model: right answers to new tasks with it and to old ones
    without, in the same batches.  And merged into the weights, in float32: the share of texts that
    are those of the adapter beside the model."""
    model = tuned_model("adapter", out)
    mixed = [each for pair in zip(new, old, strict=False) for each in pair]
    answers = replies(model, mixed, [NAME, None] * (len(mixed) // 2))
    right = [reply == task.expected for reply, task in zip(answers, mixed, strict=True)]
    merge(EMBEDDED, out / "adapter", out / "merged", "f32", force=True)
    merged = sfumato.load(out / "merged", dtype="float32")
    pairs = zip(
        replies(merged, mixed, [None] * len(mixed)),
        replies(model, mixed, [NAME] * len(mixed)),
        strict=True,
    )
    return {
        "new with it": sum(right[::2]) / len(right[::2]),
        "old without it": sum(right[1::2]) / len(right[1::2]),
        "same texts when merged": sum(a == b for a, b in pairs) / len(mixed),
    }


def line_of(point: Point) -> str:
    figures = "".join(f"{name} {share:7.1%}   " for name, share in point.exact.items())
    return (
        f"{point.way:8}{point.steps:6} steps{point.seconds:7.0f} s{point.cpu_seconds:7.0f} s CPU   "
        f"{figures}"
    )


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reverse")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--old", type=float, default=0.6, help="share of old conversations")
    parser.add_argument("--rate", type=float, default=1e-3, help="of all weights")
    parser.add_argument("--adapter-rate", type=float, default=4e-3)
    parser.add_argument("--targets", nargs="+", default=Tuning().targets)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--count", type=int, default=100, help="tasks of each set")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def tuning_of(way: str, args: argparse.Namespace) -> Tuning:
    rate = args.rate if way == "full" else args.adapter_rate
    return Tuning(
        full=way == "full",
        targets=tuple(args.targets),
        encoder_weight=ENCODER_WEIGHT,  # as the model was trained
        rank=args.rank,
        alpha=2.0 * args.rank,
        steps=args.steps,
        batch=args.batch,
        at_once=args.at_once,
        rate=rate,
        last_rate=rate / 50,
        warm_up=10,
        samples=0,
        seed=args.seed,
    )


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    task = TASKS[args.task]
    sets = {"new": cases(task, args.count, args.seed)}
    sets |= {name: each[: args.count] for name, each in evaluation_sets(0, args.count).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "chats.jsonl"
    made = chats(task, args.steps * args.batch, args.old, args.seed)
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in made)
    data.write_text(lines, encoding="utf-8")
    points = list[Point]()

    def shown(point: Point) -> None:
        points.append(point)
        print(line_of(point), flush=True)

    if "base" in args.ways:
        exact = measured(sfumato.load(dtype="float32"), sets, None)
        shown(Point("base", 0, 0.0, 0.0, exact))
    report: dict[str, Any] = {"task": args.task, "threads": torch.get_num_threads()}
    for way in ("full", "adapter"):
        if way in args.ways:
            out = args.out / way
            shutil.rmtree(out, ignore_errors=True)
            learn(way, data, out, tuning_of(way, args), args.every, sets, shown)
    if "accept" in args.ways:
        out = args.out / "adapter"
        size = sum(file.stat().st_size for file in (out / "adapter").iterdir())
        report |= {"bytes": size} | accepted(out, sets["new"], sets["questions"])
        print(f"adapter: {report}")
    print(json.dumps(report | {"points": [point._asdict() for point in points]}))


if __name__ == "__main__":
    main(sys.argv[1:])
