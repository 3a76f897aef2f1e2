from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sfumato import SamplerConfig, SoftTopK
from sfumato.bench.evaluate import Score
from sfumato.engine.events import Failed, Finished, Handle
from sfumato.engine.request import Request

SCORES = {
    "sudoku": asdict(Score(3, 1 / 3, 2.5, 4, 1.0, 7.5)),
    "questions": asdict(Score(12, 1.0, 2.0, 2, 1.0, 6.0)),
}
TASKS = [
    {"question": "Capital of France?", "answers": ["Paris"]},
    {"question": "Capital of Italy?", "answers": "Rome"},
    {"question": "slow", "answers": ["8"]},
    {"question": "nothing", "answers": ["8"]},
]


class Answering:
    """An engine that answers by rule; an answer has as many steps as the request allows."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.left = 10**9  # requests until it breaks

    def submit(self, request: Request) -> Handle[Any]:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.requests.append(request)
        handle: Handle[Any] = Handle(request.id, None, lambda: None)
        question = request.messages[-1]["content"]  # type: ignore[index]
        if question == "slow":
            handle.deliver(Failed("timeout", "took too long"))
            return handle
        steps = request.sampler.max_steps or 2  # type: ignore[union-attr]
        text = "" if question == "nothing" else "It is Paris."
        account = SimpleNamespace(
            steps=(steps,), output_tokens=4, convergence=("converged",), total_s=1.5, queue_s=0.5
        )
        doubted = SimpleNamespace(undecided=True) if request.verify == "abstain" else None
        reply = SimpleNamespace(text=text, stop_reason="eos", verification=doubted)
        handle.deliver(Finished(reply, account))  # type: ignore[arg-type]
        return handle

    @contextmanager
    def running(self, *_: Any) -> Iterator[Answering]:
        yield self


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answering:
    answering = Answering()
    monkeypatch.setattr("sfumato.cli.rows.running", answering.running)
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: None)
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return answering


def test_held_out_tasks_measure_the_loaded_model(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run(*args: Any, **options: Any) -> Any:
        options.pop("progress")(1, 9)
        calls.append((*args, options))
        return SCORES

    monkeypatch.setattr("sfumato.bench.evaluate.run", run)
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: (args.model, args.cache_type))
    assert json.loads(cli("eval", "-m", "x", "--json", "--count", "9").out) == SCORES
    assert calls == [(("x", None), {"count": 9, "seed": 0, "config": SamplerConfig()})]
    cli("eval", "--seed", "3", "--cache-type", "fp8")
    assert calls[1] == ((None, "fp8"), {"count": 200, "seed": 3, "config": SamplerConfig()})
    cli("eval", "--soft-skip", "0.01")
    cli("eval", "--soft-top-k", "16:4", "--steps", "3")
    configs = [fields["config"] for _, fields in calls[2:]]
    soft = SamplerConfig(soft_top_k=SoftTopK(16, 4), max_steps=3)
    assert configs == [SamplerConfig(soft_skip=0.01), soft]
    lines = cli("eval").out.splitlines()
    assert lines[1].split() == ["sudoku", "3", "33.3%", "2.50", "4", "100.0%"]
    refused = cli("eval", "--out", "a.jsonl")
    assert refused.code == 2 and "--out: belongs to --tasks" in refused.err


def test_tasks_of_a_file_are_asked_and_judged(cli: Any, engine: Answering) -> None:
    words = ("eval", "--tasks", "t.jsonl", "--seed", "5", "--system", "Be brief.", "--top-k", "3")
    done = cli(*words, "--curves", "2,9", "--plot", "c.svg", "--json")
    report = json.loads(done.out)
    counts = [[each[name] for name in ("right", "wrong", "abstained", "failed", "forwards")]
              for each in report["figures"]]  # fmt: skip
    assert counts == [[1, 1, 1, 1, 6], [1, 1, 1, 1, 27]] and report["of"] == 8
    assert [each["seconds_p50"] for each in report["figures"]] == [1.0, 1.0]
    given = [(one.seed, one.sampler.max_steps, one.sampler.top_k) for one in engine.requests]  # type: ignore[union-attr]
    assert given == [(5 + n, most, 3) for most in (2, 9) for n in range(4)]
    assert len({one.id for one in engine.requests}) == 8
    assert engine.requests[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert engine.requests[0].timeout_s == 600 and Path("c.svg").read_text().count("<circle") == 2
    lines = cli("eval", "--tasks", "t.jsonl", "--count", "3").out.splitlines()
    assert [line.split()[-1] for line in lines[:6]] == ["own", "3", "1", "1", "0", "1"]
    assert lines[-2:] == ["wrong: Capital of Italy? → It is Paris.", "note: timeout: took too long"]
    doubted = json.loads(cli(*words, "--verify", "abstain", "--json").out)["figures"][0]
    assert (doubted["abstained"], doubted["failed"]) == (3, 1)
    assert cli("eval", "--tasks", "facts", "--count", "2").code == 0  # those of the package


def test_a_broken_run_goes_on_with_no_task_lost_or_doubled(cli: Any, engine: Answering) -> None:
    words = ("eval", "--tasks", "t.jsonl", "--curves", "2,9", "-o", "o.jsonl", "--json")
    engine.left = 3
    assert cli(*words).code == 130
    with Path("o.jsonl").open("a") as file:  # a row that was not written to its end
        file.write('{"task": 4, "max_st')
    engine.left = 10**9
    done = cli(*words)
    rows = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    order = [(row["max_steps"], row["task"]) for row in rows]
    assert order == [(most, n) for most in (2, 9) for n in (1, 2, 3, 4)]
    assert len(engine.requests) == 8 and json.loads(done.out)["figures"][0]["tasks"] == 4
    assert cli(*words).code == 0 and len(engine.requests) == 8  # it is complete
    for more, why in (
        (("--seed", "1"), "was made with other seed"),
        (("--curves", "2,8"), "was made with other steps"),
        (("--count", "2"), "was made with other tasks"),
    ):
        refused = cli(*words, *more)
        assert refused.code == 2 and why in refused.err
    Path("o.jsonl").write_text(json.dumps({**rows[0], "question": "Another?"}) + "\n")
    refused = cli(*words)
    assert refused.code == 2 and "has rows of other tasks; name another file" in refused.err
    assert len(engine.requests) == 8


def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(
    cli: Any, engine: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: pytest.fail("loaded"))
    Path("code.jsonl").write_text('{"question": "a?", "check": "answer == \'a\'"}\n')
    Path("bad.jsonl").write_text('{"question": "a?", "answers": ["b"]}\n{"question": "c?"}\n')
    for words, why in (
        (("--tasks", "code.jsonl"), "allow them with --allow-code"),
        (("--tasks", "bad.jsonl"), "bad.jsonl:2: must have answers or a check"),
        (("--tasks", "gone.jsonl"), "gone.jsonl"),
        (("--tasks", "t.jsonl", "--curves", "2", "--steps", "3"), "give at most one of them"),
        (("--tasks", "t.jsonl", "--curves", "2", "--mode", "causal"), "causal replies have no"),
        (("--tasks", "t.jsonl", "--out", "o.csv"), "must end in .jsonl"),
        (("--tasks", "t.jsonl", "--out", "t.jsonl"), "is the file of tasks"),
    ):
        refused = cli("eval", *words)
        assert refused.code == 2 and why in " ".join(refused.err.split()), words
    monkeypatch.undo()
