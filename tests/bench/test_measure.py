from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from sfumato.bench import measure as module
from sfumato.bench.environment import PeakMemory
from sfumato.bench.measure import measure
from sfumato.bench.report import METRICS, PARTS, Case, Report, Work, cases, conversation
from sfumato.bench.subject import Subject, loaded
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.sampler_config import SamplerConfig, fixed_steps
from sfumato.tasks.reply import ReplyTask

ON_DEVICES = {"peak_device", "peak_device_used", "step_floor_ms", "step_predicted_ms"}
LOCAL = {metric.key for metric in METRICS if metric.group != "where"} - {"load_s"} - ON_DEVICES


def measured(subject: Subject, work: Work, *case: Case, **options: Any) -> Report:
    sampler = options.pop("sampler", fixed_steps(3))
    with PeakMemory() as memory:
        return measure(subject, work, list(case), sampler, memory, **options)


def test_what_is_measured_agrees_with_itself(tiny: Subject) -> None:
    report = measured(tiny, Work([20], warmup=1, repeats=2), Case(80))
    (result,) = report.cases
    values = result.values
    assert set(values) == LOCAL
    assert (result.requests, report.interrupted) == (2, False)
    assert values["prompt_tokens"] == [20, 20]
    assert values["output_tokens"] == [80, 80]  # two canvases of 32, and half of a third
    assert values["steps_per_canvas"] == [3] * 6
    assert len(values["step_ms"]) == 18
    assert values["tokens_per_forward"] == [80 / 9, 80 / 9]
    for request in range(2):
        total = values["total_s"][request]
        assert values["visible_tps"][request] == pytest.approx(80 / total)
        waits = [values[k][request] for k in ("setup_s", "first_draft_s", "first_commit_s")]
        assert waits == sorted(waits)
        assert values["first_token_s"][request] == values["first_commit_s"][request]
        assert waits[-1] < values["last_token_s"][request] <= total
        denoising = 96 / values["canvas_tps"][request]
        steps = values["step_ms"][9 * request : 9 * request + 9]
        assert sum(steps) / 1e3 == pytest.approx(denoising)
        generating = denoising + 2 * values["commit_ms"][request] / 1e3
        assert values["blocks_per_s"][request] == pytest.approx(3 / generating)
        prefill = 20 / values["prefill_tps"][request]
        assert prefill + generating < total
    assert values["throughput_tps"][0] <= 160 / sum(values["total_s"])


def test_every_case_is_measured_under_its_own_setting(tiny: Subject) -> None:
    before = torch.get_num_threads()
    report = measured(tiny, Work([4], 0, 1), *cases([32], threads=[1, 2], context=[4, 50]))
    assert [(r.case.threads, r.case.context) for r in report.cases] == [
        (1, 4), (1, 50), (2, 4), (2, 50),
    ]  # fmt: skip
    assert [r.values["prompt_tokens"] for r in report.cases] == [[4.0], [50.0]] * 2
    assert torch.get_num_threads() == before


def test_requests_at_a_time(tiny: Subject) -> None:
    """Each has its own figures, and all of them together the speed; what one says does not depend
    on the others."""
    together, one = measured(tiny, Work([20], 1, 4), *cases([64], concurrency=[4, 1])).cases
    assert (together.requests, one.requests) == (4, 4)
    for key in ("output_tokens", "steps_per_canvas", "prompt_tokens"):
        assert together.values[key] == one.values[key]
    wall = sum(together.values["output_tokens"]) / together.values["throughput_tps"][0]
    assert wall < sum(together.values["total_s"])  # their times overlap
    assert max(together.values["total_s"]) <= wall


def test_a_request_that_fails_is_counted_as_such(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, calls = ReplyTask.stepped, iter(range(100))

    def failing(self: ReplyTask, *step: Any) -> None:
        if next(calls) in fail:
            raise FloatingPointError("no numbers")
        stepped(self, *step)

    monkeypatch.setattr(ReplyTask, "stepped", failing)
    fail = {1}
    (result,) = measured(tiny, Work([4], 0, 2), Case(32)).cases
    assert (result.requests, result.failures) == (1, ["internal: no numbers"])
    assert len(result.values["step_ms"]) == 2 + 3 and len(result.values["total_s"]) == 1
    fail = set(range(100))
    with pytest.raises(ValueError, match="all 2 requests failed, the first: internal: no numbers"):
        measured(tiny, Work([4], 0, 2), Case(32))


def test_more_slots_than_the_memory_holds_are_refused(tiny: Subject) -> None:
    message = r"an engine of 1000000000 slots .* needs .*; lower --concurrency, --max-tokens or"
    with pytest.raises(ValueError, match=message):
        measured(tiny, Work([4], 0, 1), Case(32, concurrency=10**9))


def test_an_empty_prompt_has_no_prefill_and_one_canvas_no_commit(tiny: Subject) -> None:
    (result,) = measured(tiny, Work([0], 0, 1), Case(32, context=0)).cases
    assert not {"prefill_tps", "commit_ms"} & set(result.values)
    assert result.summaries()["prefill_tps"] is None


def test_where_the_time_goes(tiny: Subject) -> None:
    (result,) = measured(tiny, Work([5], 0, 1), Case(64), where=True).cases
    parts = [result.values[key] for key in PARTS]
    step_ms = result.values["where_step_ms"]
    assert [len(part) for part in parts] == [3] * len(PARTS)  # one canvas, whatever the length
    for step, *shares in zip(step_ms, *parts, strict=True):
        assert sum(shares) == pytest.approx(step)
        assert all(share > 0 for share in shares)
    hooks = (m._forward_hooks or m._forward_pre_hooks for m in tiny.network.transformer.modules())
    assert not any(hooks)


@pytest.mark.parametrize("min_tokens", [0, 40])
def test_the_timed_pass_does_what_a_request_does(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch, min_tokens: int
) -> None:
    requested: list[list[int]] = []
    timed: list[list[int]] = []
    stepped, learn = ReplyTask.stepped, Canvas.learn

    def of_request(self: ReplyTask, draft: Draft, *seconds: float) -> None:
        requested.append(draft.token_ids.tolist())
        stepped(self, draft, *seconds)

    def of_timed_pass(self: Canvas, *step: Any) -> None:
        learn(self, *step)
        timed.append(self.history[-1].tolist())

    subject = replace(tiny, model=copy(tiny.model))
    subject.model.end_ids = (7,)
    sampler = SamplerConfig(top_k=5, min_tokens=min_tokens, max_steps=3)
    monkeypatch.setattr(ReplyTask, "stepped", of_request)
    measured(subject, Work([6], 0, 1), Case(32), sampler=sampler)
    monkeypatch.setattr(Canvas, "learn", of_timed_pass)
    config = replace(sampler.over(tiny.model.sampler_defaults), canvas_length=32)
    module.where_it_goes(subject, subject.prompt_ids(6, 0), config, 0)
    assert requested == timed != []


def test_ctrl_c_keeps_what_was_measured(tiny: Subject) -> None:
    def progress(number: int, count: int) -> None:
        assert count == 2 * (1 + 3)
        if number == 4:
            raise KeyboardInterrupt

    report = measured(tiny, Work([4], 1, 3), Case(32), Case(64), progress=progress)
    assert report.interrupted
    assert [result.requests for result in report.cases] == [2]
    assert len(report.cases[0].values["total_s"]) == 2
    assert report.cases[0].values["throughput_tps"][0] > 0


def test_ctrl_c_in_a_request_keeps_its_steps(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, calls = ReplyTask.stepped, iter(range(1, 100))

    def pressed(self: ReplyTask, *step: Any) -> None:
        if next(calls) == 8:  # in the third canvas of three
            raise KeyboardInterrupt
        stepped(self, *step)

    monkeypatch.setattr(ReplyTask, "stepped", pressed)
    report = measured(tiny, Work([4], 0, 1), Case(96))
    (result,) = report.cases
    assert (report.interrupted, result.requests) == (True, 0)
    assert len(result.values["step_ms"]) == 8
    assert result.values["first_commit_s"] > result.values["first_draft_s"]
    assert not {"total_s", "visible_tps", "last_token_s"} & set(result.values)


@pytest.mark.parametrize(
    ("prompt", "case", "message"),
    [
        (9, Case(32, context=8), "context: a prompt of 9 tokens is more than 8"),
        (9, Case(10_000_000), "max_tokens"),
        (conversation("Hi"), Case(32), "prompts: random weights have no tokenizer"),
    ],
)
def test_what_cannot_be_done_is_refused_before_measuring(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch, prompt: Any, case: Case, message: str
) -> None:
    monkeypatch.setattr(module, "_measure_case", lambda *_: pytest.fail("was measured"))
    with pytest.raises(ValueError, match=message):
        measured(tiny, Work([4, prompt]), Case(32), case)


def test_a_loaded_model_reads_its_prompts() -> None:
    import sfumato

    subject = loaded(sfumato.load(device="cpu"))
    work = Work([conversation("What is the capital of France?")], 0, 1)
    report = measured(subject, work, Case(64), sampler=SamplerConfig())
    (result,) = report.cases
    assert report.subject["formats"] == {"BF16": 2998244}
    assert report.subject["precision"] == "float32"
    assert "EntropyBound(bound=0.1)" in report.subject["sampler"]
    assert result.values["load_s"] == [subject.load_s]
    ids = subject.prompt_ids(work.prompts[0], 0)
    assert result.values["prompt_tokens"] == [len(ids)]
    filled = subject.prompt_ids(work.prompts[0], 0, context=100)
    assert len(filled) == 100
    assert (filled[0], filled[-1]) == (ids[0], ids[-1])


def test_an_end_token_is_not_visible() -> None:
    import sfumato

    subject = loaded(sfumato.load(device="cpu"))
    work = Work([conversation("What is the capital of France?")], 0, 1)

    def tokens(**options: Any) -> list[float]:
        sampler = SamplerConfig(**options)
        (result,) = measured(subject, work, Case(32), sampler=sampler).cases
        return result.values["output_tokens"]

    assert tokens()[0] < 32 == tokens(ignore_eos=True)[0]
