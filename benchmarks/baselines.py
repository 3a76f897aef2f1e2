"""What several dozen requests of each kind give, recorded, and compared with an earlier record.

    python -m benchmarks.baselines record FILE.json
    python -m benchmarks.baselines compare FILE.json [--only KIND] [--leave-out FIELD]

For a change that must leave every reply as it is: record a file before it, and compare after each
step of the work. The requests of `baseline_cases.py` run on the embedded model and on a tiny random
one, each of them in up to five ways: by the library's call; alone in an engine, one after another
in its only slot; beside all others in an engine of three slots, so that rows wait, take
prefixes over, share forwards and chunks, and find larger slots; beside them with late steps,
whose graphs are calls that are repeated; and, for one of RECORDED on the random model, with late
steps of recorded operations, which run without Python. Of each run the file has texts, token ids
and drafts as hashes, stop reasons, steps, convergence, warnings, events in their order, log
probabilities, and what of the account does not depend on time or on other rows. It has no times.

`compare` runs the same again, prints each difference in words, and exits with 1 where there is one.
Numbers may differ by TOLERANCE, all else has to be equal. --only runs some kinds (without the
other requests, which no result depends on), --model one model; --leave-out ignores a field that
the change is meant to alter, such as account.retries; each of the three may be given several times.
A file is of one machine: other instructions of the processor round differently. The models run side
by side, each on one thread of a CPU: some three minutes of the processor in all. What the requests
shares, and how often graphs ran, is printed, for the reader to see that they did.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.baseline_cases import KINDS, Case
from tests.support.random_model import random_model
from tests.support.recorded_graphs import RecordedGraphs, RepeatedCalls
from torch import Tensor

import sfumato
from sfumato import (
    Decision,
    Done,
    Draft,
    Engine,
    EngineConfig,
    Failed,
    Filled,
    Finished,
    Model,
    Reply,
    Request,
    Settled,
)
from sfumato.engine import Decided, PromptScores
from sfumato.ops.registry import reference_only

GRAPH_BACKEND = "sfumato.engine.runner.graph_backend"
"""What the engine asks for the graphs of a device; a stand-in takes its place."""
TOLERANCE = 1e-4
SHOWN = 100  # characters of a value, in a difference
MOST_SHOWN = 200  # differences
RECORDED = 4  # one of so many requests is run with recorded operations, which are slow

ONE, COMPANY = EngineConfig(slots=1, context=512), EngineConfig(
    slots=3, context=288, prefill_chunk=24, queue=10_000
)  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "embedded": lambda: sfumato.load(device="cpu", dtype="float32"),
    "random": lambda: random_model(canvas_length=16),
}

ACCOUNT = (
    *("seed", "prompt_tokens", "requested_tokens", "output_tokens", "thought_tokens"),
    *("canvas_tokens", "steps", "convergence", "retries", "questions", "reads"),
    *("accepted_prediction", "rejected_prediction"),
)
OF_ONE = "cached_tokens", "context", "allocated"
"""Figures of an account that depend on other rows."""
ANSWER = (
    *("value", "probabilities", "confidence", "score", "label_mass", "is_label"),
    *("samples", "spread", "orders", "order_spread"),
)

Facts = dict[str, Any]


# What is recorded.


def digest(values: Iterable[Any]) -> str:
    return sha256(repr(list(values)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """A value as JSON gives it back, its numbers rounded."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 6)
    return value if isinstance(value, str | int | None) else str(value)


class Recording:
    """Takes the events of one request, and keeps what is compared of them."""

    def __init__(self, case: Case, alone: bool) -> None:
        """alone: whether the request has an engine's only slot, for figures that tell it."""
        self.wants_end = case.ends == "queued"
        self._ends, self._alone = case.ends, alone
        self._order: list[str] = []
        self._drafts = sha256()
        self._settled: list[Facts] = []
        self._end: Facts = {}

    def __call__(self, event: Any) -> None:
        name = type(event).__name__.lower()
        self._order.append(name)
        if isinstance(event, Draft):
            self._draft(event)
        elif isinstance(event, Settled):
            self._settled.append(_settled(event))
        else:
            self._end |= self._ended(event)
        self.wants_end = self.wants_end or name == self._ends

    def raised(self, error: Exception) -> None:
        self._end["raised"] = f"{type(error).__name__}: {error}"

    def facts(self) -> Facts:
        runs = [(name, len(list(run))) for name, run in groupby(self._order)]
        events = " ".join(name if count == 1 else f"{count} {name}" for name, count in runs)
        drafts = self._drafts.hexdigest()[:16]
        facts = {"events": events, "drafts": drafts, "settled": self._settled} | self._end
        return dict(plain(facts))

    def _draft(self, draft: Draft) -> None:
        columns = draft.token_ids, draft.accepted, draft.pinned
        lists = [None if column is None else column.tolist() for column in columns]
        self._drafts.update(repr((draft.canvas, draft.step, draft.max_steps, lists)).encode())

    def _ended(self, event: Any) -> Facts:
        match event:
            case Done():
                return {"reply": _reply(event.reply)}
            case Reply():
                return {"reply": _reply(event)}
            case Filled():
                return {"filled": _filled(event)}
            case Finished():
                facts = {"reply": _reply(event.reply), "account": self._account(event.account)}
                if event.scores is not None:
                    facts["scores"] = _scores(event.scores)
                if event.vector is not None:
                    facts["vector"] = event.vector
                return facts
            case Failed():
                return {"failed": [event.kind, event.message]}
            case Decision():
                facts = {"answers": {name: _answer(event[name]) for name in event}}
                return facts | {"reads": event.usage.reads}
            case Decided():
                facts = {"answers": {name: _answer(each) for name, each in event.answers.items()}}
                usage = {"input_tokens": event.usage.input_tokens, "reads": event.usage.reads}
                return facts | usage | {"account": self._account(event.account)}
        raise AssertionError(f"{type(event).__name__}: an event that nothing records")

    def _account(self, account: Any) -> Facts:
        facts = {name: getattr(account, name) for name in ACCOUNT}
        report = account.constraint
        facts["constraint"] = None if report is None else asdict(report)
        facts["has_draft"] = account.first_draft_s is not None
        facts["has_commit"] = account.first_commit_s is not None
        if self._alone:
            facts |= {name: getattr(account, name) for name in OF_ONE}
            facts["forwards"] = len(account.step_s)
        return facts


def _settled(event: Settled) -> Facts:
    facts = {
        "canvas": event.canvas,
        "text": event.text,
        "thought": event.thought,
        "ids": digest(event.token_ids),
        "convergence": event.convergence,
        "calls": [[call.name, call.arguments] for call in event.tool_calls],
        "end_id": event.end_id,
    }
    if event.top_probs is not None:
        facts["top"] = event.top_probs[:, 0]
        facts["columns"] = event.top_probs.shape[-1]
    return facts | {
        name: value
        for name, value in (("named", event.named), ("log_probs", event.log_probs))
        if value is not None
    }


def _reply(reply: Reply) -> Facts:
    stats = reply.stats
    facts: Facts = {
        "text": reply.text,
        "thought": reply.thought,
        "calls": [[call.name, call.arguments] for call in reply.tool_calls],
        "ids": digest(reply.token_ids),
        "tokens": len(reply.token_ids),
        "stop_reason": reply.stop_reason,
        "stop": reply.stop,
        "warnings": reply.warnings,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "canvases": stats.canvases,
        "steps": stats.steps,
        "convergence": stats.convergence,
        "accepted_prediction": stats.accepted_prediction,
        "constraint": None if stats.constraint is None else asdict(stats.constraint),
    }
    if reply.filled is not None:
        facts["filled"] = _filled(reply.filled)
    return facts


def _filled(filled: Filled) -> Facts:
    return {
        "text": filled.text,
        "warnings": filled.warnings,
        "steps": filled.stats.steps,
        "convergence": filled.stats.convergence,
        "holes": [asdict(hole) for hole in filled.holes],
    }


def _scores(given: PromptScores) -> Facts:
    facts: Facts = {"ids": digest(given.ids)}
    scores = given.scores
    if scores is not None:
        top = scores.top_log_probs
        facts |= {"log_probs": scores.log_probs, "ranks": scores.ranks, "top": top.mean(dim=0)}
    return facts


def _answer(answer: Any) -> Facts:
    """A typed answer of the library, or an answer as an engine gives it."""
    facts = {name: getattr(answer, name) for name in ANSWER if hasattr(answer, name)}
    probabilities = facts["probabilities"]
    if isinstance(probabilities, dict):
        facts["probabilities"] = list(probabilities.values())
    return facts


# How requests run.


def by_library(cases: Sequence[Case]) -> Iterator[tuple[Case, Facts]]:
    for case in cases:
        if case.alone is None:
            continue
        recording = Recording(case, alone=False)
        try:
            for event in case.alone(lambda recording=recording: recording.wants_end):  # type: ignore[misc]
                recording(event)
        except Exception as error:
            recording.raised(error)
        yield case, recording.facts()


def in_engine(
    engine: Engine, cases: Sequence[Case], alone: bool = False, seed: int = 0
) -> Iterator[tuple[Case, Facts]]:
    """alone: one after another; else each is submitted some steps after the one before."""
    chosen, recordings = random.Random(seed), []
    for case in cases:
        recordings.append(Recording(case, alone))
        _submit(engine, case, recordings[-1])
        for _ in range(chosen.randrange(3)):
            engine.step()
        if alone:
            _finish(engine)
    _finish(engine)
    engine.close()
    for case, recording in zip(cases, recordings, strict=True):
        yield case, recording.facts()


def _submit(engine: Engine, case: Case, recording: Recording) -> None:
    """Submits a request, which is cancelled as soon as its recording wants its end."""
    handle: Any = None

    def sink(event: Any) -> None:
        recording(event)
        if recording.wants_end:
            handle.cancel()

    try:
        if isinstance(case.request, Request):
            handle = engine.submit(case.request, sink)
        else:
            handle = engine.decide(case.request, sink)
    except Exception as error:
        recording.raised(error)
    else:
        if recording.wants_end:
            handle.cancel()


def _finish(engine: Engine, most: int = 100_000) -> None:
    for _ in range(most):
        if not engine.step():
            return
    raise AssertionError(f"the engine is still busy after {most:,} steps")


def mixed(cases: Sequence[Case]) -> list[Case]:
    """The requests of all kinds in turn, two of one kind after each other."""
    kinds = [list(run) for _, run in groupby(cases, lambda case: case.kind)]
    most = max(map(len, kinds), default=0)
    return [case for at in range(0, most, 2) for kind in kinds for case in kind[at : at + 2]]


def recorded(cases: Sequence[Case]) -> list[Case]:
    """One of RECORDED requests of each kind, the same ones whichever other kinds run."""
    kinds = groupby(cases, lambda case: case.kind)
    return mixed([case for _, run in kinds for case in list(run)[::RECORDED]])


def ways(model: Model, cases: Sequence[Case], is_tiny: bool) -> Iterator[tuple[str, Case, Facts]]:
    """Each request in each way. is_tiny: whether the model is small enough for what is slow."""
    for case, facts in by_library(cases):
        yield "by the library", case, facts
    for _, run in groupby(
        cases, lambda case: case.kind
    ):  # each kind by itself: prefixes are reused
        for case, facts in in_engine(Engine(model, ONE), list(run), alone=True):
            yield "alone in an engine", case, facts
    together, backend = mixed(cases), RepeatedCalls()
    engine = Engine(model, COMPANY)
    for case, facts in in_engine(engine, together):
        yield "beside others", case, facts
    _report("beside others", engine)
    engine = late_engine(model, backend)
    for case, facts in in_engine(engine, together, seed=1):
        yield "with late steps", case, facts
    _report("with late steps", engine, backend)
    if is_tiny:
        backend = RecordedGraphs()
        with reference_only():
            engine = late_engine(model, backend)
            for case, facts in in_engine(engine, recorded(cases), seed=2):
                yield "with recorded graphs", case, facts
        _report("with recorded graphs", engine, backend)


def _report(way: str, engine: Engine, backend: RecordedGraphs | None = None) -> None:
    totals = engine.state().totals
    rows = totals.steps / max(1, totals.forwards)
    line = f"{way}: {rows:.2f} rows a forward, {totals.cached_tokens:,} tokens of prompts reused"
    if backend is not None:
        line += f", {backend.captures} graphs replayed {backend.replays:,} times"
    print(line, file=sys.stderr)


def late_engine(model: Model, backend: RecordedGraphs) -> Engine:
    """An engine whose device works by itself, on a stand-in for graphs."""
    with patch(GRAPH_BACKEND, lambda device: backend):
        return Engine(model, COMPANY)


def run_model(name: str, kinds: Sequence[str]) -> dict[str, Facts]:
    """All runs on one model, by its name, kind, request and way. Prints how long they took."""
    torch.set_num_threads(1)
    logging.getLogger("sfumato").setLevel(logging.ERROR)  # some rules run on no several rows
    began, model = time.perf_counter(), MODELS[name]()
    cases = [case for kind in kinds for case in KINDS[kind](model)]
    runs, cpu = {}, time.process_time()
    spent: Counter[str] = Counter()
    for way, case, facts in ways(model, cases, name == "random"):
        runs[f"{name}: {case.kind}: {case.name}, {way}"] = facts
        spent[way], cpu = spent[way] + time.process_time() - cpu, time.process_time()
    taken = ", ".join(f"{way} {seconds:.0f}" for way, seconds in spent.items())
    seconds = time.perf_counter() - began
    print(
        f"{name}: {len(cases)} requests, {seconds:.0f} s; of the processor: {taken}",
        file=sys.stderr,
    )
    return runs


def run(models: Sequence[str], kinds: Sequence[str]) -> dict[str, Facts]:
    """All runs, each model in a process of its own."""
    if len(models) == 1:
        return run_model(models[0], kinds)
    with ProcessPoolExecutor(len(models), get_context("spawn")) as pool:
        parts = list(pool.map(run_model, models, [kinds] * len(models)))
    return {name: facts for part in parts for name, facts in part.items()}


# How records are compared.


def differences(before: Any, now: Any, left_out: Collection[str], where: str = "") -> Iterator[str]:
    """Each difference in words. left_out: fields that may differ."""
    if where in left_out:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            inner = f"{where}.{name}" if where else name
            if inner in left_out:
                continue
            if name not in now:
                yield f"{inner} was {_shown(before[name])} and is not there any more"
            elif name not in before:
                yield f"{inner} was not there and is {_shown(now[name])}"
            else:
                yield from differences(before[name], now[name], left_out, inner)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, left_out, f"{where}[{number}]")
    elif not _same(before, now):
        yield f"{where} was {_shown(before)} and is {_shown(now)}"


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, float) or isinstance(now, float):
        numbers = isinstance(before, float | int) and isinstance(now, float | int)
        return numbers and math.isclose(before, now, rel_tol=0, abs_tol=TOLERANCE)
    return type(before) is type(now) and before == now


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def compare(before: Facts, now: Facts, left_out: Collection[str]) -> int:
    """Prints the differences; returns how many runs differ."""
    lines, differing = [], 0
    for name in dict.fromkeys((*before, *now)):
        if name not in before or name not in now:
            facts = ["was not run before" if name in now else "was run before, and is not now"]
        else:
            facts = list(differences(before[name], now[name], left_out))
        lines += [f"{name}: {each}" for each in facts]
        differing += bool(facts)
    for line in lines[:MOST_SHOWN]:
        print(line)
    if len(lines) > MOST_SHOWN:
        print(f"and {len(lines) - MOST_SHOWN:,} more")
    total = len(before.keys() | now.keys())
    print(
        f"{differing:,} of {total:,} runs differ" if differing else f"all {total:,} runs as before"
    )
    return differing


def made_with() -> dict[str, str]:
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(),
            "python": platform.python_version(), "machine": platform.machine()}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", choices=tuple(KINDS), metavar="KIND")
    parser.add_argument("--model", action="append", choices=tuple(MODELS), metavar="NAME")
    parser.add_argument("--leave-out", action="append", default=[], metavar="FIELD")
    args = parser.parse_args(arguments)
    models, kinds = args.model or list(MODELS), args.only or list(KINDS)
    if args.what == "record":
        facts = {"made_with": made_with(), "runs": run(models, kinds)}
        args.file.write_text(json.dumps(facts, ensure_ascii=False, indent=0), encoding="utf-8")
        print(f"{args.file}: {len(facts['runs']):,} runs")
        return 0
    kept = json.loads(args.file.read_text(encoding="utf-8"))
    if kept["made_with"] != made_with():
        print(f"the file was made with {kept['made_with']}, and this is {made_with()}")
    wanted = tuple(f"{model}: {kind}: " for model in models for kind in kinds)
    before = {name: facts for name, facts in kept["runs"].items() if name.startswith(wanted)}
    return int(bool(compare(before, run(models, kinds), args.leave_out)))


if __name__ == "__main__":
    raise SystemExit(main())
