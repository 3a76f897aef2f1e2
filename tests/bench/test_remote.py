from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.fake_openai_server import DONE, Scripted, end, event, scripted, text

from sfumato.bench import remote
from sfumato.bench.remote import Endpoint, ServerError
from sfumato.bench.report import (
    METRICS,
    Case,
    CaseReport,
    Report,
    Work,
    cases,
    conversation,
    to_json,
    to_tables,
)

USAGE = {"prompt_tokens": 12, "completion_tokens": 40}
TIMINGS = {
    "prompt_per_second": 600.0,
    "predicted_ms": 400.0,
    "diffusion": {
        "blocks": 2,
        "steps": 10,
        "ms_per_step": 35.0,
        "canvas_tokens_per_second": 180.0,
        "tokens_per_forward": 4.0,
    },
}


def measured(server: Scripted, work: Work, *case: Case, **fields: Any) -> Report:
    return remote.measure(Endpoint(server.url), {"model": "painter", **fields}, work, list(case))


def plain(body: dict[str, Any]) -> Iterator[str | float]:
    """A server that gives nothing but text."""
    yield from (text(role="assistant"), 0.05, text("Hel"), 0.05, text("lo"), end(), 0.05, DONE)


def frank(body: dict[str, Any]) -> Iterator[str | float]:
    """A server that tells all."""
    yield from (0.02, event(choices=[], draft={"step": 1}), 0.02, text("Hello"), end("length"))
    yield from (event(choices=[], usage=USAGE, timings=TIMINGS), DONE)


def values_of(script: Any) -> dict[str, list[float]]:
    with scripted(script) as server:
        (result,) = measured(server, Work([conversation("Hi")], 0, 1), Case(64)).cases
    return result.values


def test_what_a_server_does_not_tell_is_absent() -> None:
    for _ in range(10):  # a busy machine may read two events at once
        values = values_of(plain)
        assert set(values) == {"first_token_s", "last_token_s", "total_s"}
        (first,), (last,), (total,) = values.values()
        assert 0.05 <= first <= last <= total and total >= 0.15
        if first <= last - 0.02 <= total - 0.04:  # half of what the server waits
            break
    else:
        pytest.fail(f"{first=} {last=} {total=}")


def test_what_it_tells_is_in_the_same_report() -> None:
    values = values_of(frank)
    assert set(values) <= {metric.key for metric in METRICS}
    (total,) = values["total_s"]
    expected = {
        "prompt_tokens": 12, "output_tokens": 40, "prefill_tps": 600, "step_ms": 35,
        "steps_per_canvas": 5, "tokens_per_forward": 4, "canvas_tps": 180, "blocks_per_s": 5,
        "visible_tps": pytest.approx(40 / total),
    }  # fmt: skip
    assert {key: values[key] for key in expected} == {k: [v] for k, v in expected.items()}
    assert 0.02 <= values["first_draft_s"][0] < values["first_token_s"][0]
    assert values["throughput_tps"][0] <= 40 / total


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "Hm"}, {"tool_calls": [{"index": 0}]}, {"content": "a"}]
)
def test_whatever_is_visible_counts(delta: dict[str, Any]) -> None:
    assert "first_token_s" in values_of(lambda body: iter([text(**delta), end(), DONE]))


@pytest.mark.parametrize(
    "chunk",
    [
        {"usage": {"completion_tokens": "many"}, "timings": [1], "choices": [7]},
        {"usage": None, "timings": {"diffusion": 3, "predicted_ms": True}, "choices": None},
        {"usage": 5, "choices": [{"delta": None}]},
        {"timings": {"diffusion": {"steps": 3, "blocks": 0}}},
        {"usage": {"completion_tokens": 10**400, "prompt_tokens": -3}},
        {"usage": {"completion_tokens": float("nan"), "prompt_tokens": float("inf")}},
        {"timings": {"prompt_per_second": 1e16, "diffusion": {"steps": 1e15, "blocks": 5e-324}}},
    ],
)
def test_nonsense_is_no_figure(chunk: dict[str, Any]) -> None:
    values = values_of(lambda body: iter([event(**chunk), text("a"), end(), DONE]))
    assert set(values) == {"first_token_s", "last_token_s", "total_s"}


def test_whatever_a_server_tells_can_be_reported() -> None:
    """The largest figures that are taken, in both directions, make finite ones."""
    usage = {"prompt_tokens": 1e15, "completion_tokens": 1e15}
    timings = {"predicted_ms": 5e-324, "diffusion": {"blocks": 1e15, "steps": 5e-324}}
    values = values_of(lambda body: iter([event(usage=usage, timings=timings), end(), DONE]))
    result = CaseReport(Case(64), values)
    report = Report({"model": "painter"}, [result])
    assert json.loads(to_json(report), parse_constant=pytest.fail)
    assert list(to_tables(report))


def test_a_name_cannot_control_a_terminal() -> None:
    with scripted(plain) as server:
        fields = {"model": "a\x1b[2J"}
        report = remote.measure(Endpoint(server.url), fields, Work([4], 0, 1), [Case(64)])
    assert server.bodies[0]["model"] == "a\x1b[2J"
    assert report.subject["model"] == "a\ufffd[2J"


def test_what_is_sent() -> None:
    with scripted(frank) as server:
        work = Work([conversation("Hi"), 9], warmup=1, repeats=2, seed=5)
        measured(server, work, Case(64), ignore_eos=True, min_tokens=10, top_k=4)
    assert server.bodies[0] == {
        "model": "painter", "messages": conversation("Hi"), "max_tokens": 64, "seed": 5,
        "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "min_tokens": 10, "top_k": 4,
    }  # fmt: skip
    assert [body["seed"] for body in server.bodies] == [5, 5, 5, 6, 6]
    made = [
        b["messages"][0]["content"] for b in server.bodies if b["messages"][0]["content"] != "Hi"
    ]
    assert [len(content.split()) for content in made] == [9, 9]
    assert made[0] != made[1]  # no prefix cache may help


def test_requests_go_together() -> None:
    def slow(body: dict[str, Any]) -> Iterator[str | float]:
        yield from (0.2, *frank(body))

    with scripted(slow) as server:
        began = time.perf_counter()
        report = measured(server, Work([4], 0, 8), *cases([64], concurrency=[4]))
        wall = time.perf_counter() - began
    (result,) = report.cases
    assert (result.requests, server.at_a_time) == (8, 4)
    assert wall < 8 * 0.2
    (throughput,) = result.values["throughput_tps"]
    assert throughput > max(8 * 40 / wall, *result.values["visible_tps"])


def test_single_failures_are_told() -> None:
    def moody(body: dict[str, Any]) -> Iterator[str | float]:
        yield from ((text("a"),) if body["seed"] == 1 else frank(body))

    with scripted(moody) as server:
        (result,) = measured(server, Work([4], 0, 3), Case(64)).cases
    assert result.requests == len(result.values["total_s"]) == 2
    assert result.failures == [f"{server.url}: the stream ended before the reply did"]


def test_only_failures_are_an_error() -> None:
    with scripted(plain, status=503) as server:
        with pytest.raises(ValueError, match=r"all 2 requests failed, the first: .*HTTP 503"):
            measured(server, Work([4], 0, 2), Case(64))
        with pytest.raises(ServerError, match="HTTP 503"):
            measured(server, Work([4], 1, 2), Case(64))
    assert len(server.bodies) == 3  # a failed warm-up ends it at once


def test_a_bug_is_not_taken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(remote, "_request", bug)
    endpoint = Endpoint("http://localhost/v1")
    with pytest.raises(TypeError, match="a bug"):
        remote.measure(endpoint, {"model": "painter"}, Work([4], 0, 2), [Case(64)])


def test_ctrl_c_keeps_what_was_measured() -> None:
    def report_progress(number: int, count: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with scripted(frank) as server:
        given = Endpoint(server.url), {"model": "painter"}
        report = remote.measure(*given, Work([4], 1, 5), [Case(64), Case(32)], report_progress)
    assert report.interrupted
    assert [result.requests for result in report.cases] == [1]
    assert isinstance(report.cases[0], CaseReport)
