"""The soak test in its short form, and that it notices what it looks for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import soak
from benchmarks.soak_clients import (
    Server,
    Soak,
    Violation,
    check_stream,
    check_whole,
    random_fields,
)

ROOT = Path(__file__).resolve().parents[2]


def chunk(index: int, text: str = "", reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text, **delta}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


DONE = b"data: [DONE]\n"


def test_eight_clients_for_some_seconds(note: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--clients", "8", "--seconds", "1.5"]
    # So short a run is all warm-up; memory is the long one's to judge.
    command += ["--slots", "4", "--growth-mib", "256"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    note(f"soak: {report['requests']} requests of 8 clients, outcomes {report['outcomes']}")
    assert report["violations"] == 0
    assert report["requests"] >= 8
    assert report["outcomes"]["eos"] > 0


def test_a_right_stream() -> None:
    answer = check_stream(
        [
            b": keep-alive\n",
            b"\n",
            b'data: {"choices": [], "draft": {"index": 0}}\n',
            chunk(0, reasoning_content="hm "),
            chunk(1, "b"),
            chunk(0, "a"),
            chunk(1, reason="length"),
            chunk(0, reason="stop"),
            b'data: {"choices": [], "usage": {}}\n',
            DONE,
        ]
    )
    assert answer == {0: "hm a", 1: "b"}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([chunk(0, "a")], "before its reply"),
        ([chunk(0, "a"), DONE], "before its reply"),
        ([chunk(0, "a", "stop")], "before its reply"),
        ([chunk(0, "a", "stop"), chunk(1, "b"), DONE], "before its reply"),
        ([DONE], "before its reply"),
        ([chunk(0, "a", "stop"), chunk(0, "b"), DONE], "goes on"),
        ([chunk(0, "a", "stop"), chunk(0, "", "stop"), DONE], "goes on"),
        ([chunk(0, "a", "stop"), DONE, DONE], "after"),
        ([chunk(0, "a"), b'data: {"error": {"message": "broken"}}\n'], "broken"),
    ],
)
def test_a_wrong_stream(lines: list[bytes], complaint: str) -> None:
    with pytest.raises(Violation, match=complaint):
        check_stream(lines)


def test_a_plain_reply() -> None:
    choice = {"index": 0, "message": {"content": "b", "reasoning_content": "a"}}
    good = json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()
    assert check_whole(good) == {0: "ab"}
    with pytest.raises(Violation, match="without an end"):
        check_whole(json.dumps({"choices": [{**choice, "finish_reason": None}]}).encode())


def test_another_text_for_the_same_seed_is_noticed() -> None:
    state = Soak(Server("localhost", 1))
    state.same(("Hello", 64, 0), "a")
    state.same(("Hello", 64, 0), "a")
    state.same(("Hello", 64, 1), "b")
    with pytest.raises(Violation, match="and before 'a'"):
        state.same(("Hello", 64, 0), "b")


def test_growth_after_the_first_third() -> None:
    assert soak.growth([0.0, 50, 100, *[200] * 50]) == 0
    assert soak.growth([float(i) for i in range(100)]) == pytest.approx(57, abs=5)
    assert soak.growth([5.0]) == 0


def test_an_audit_log_is_counted() -> None:
    lines = [json.dumps({"request_id": name, "seconds": {"total": 1}}) for name in ("a", "b", "b")]
    refused = json.dumps({"request_id": "c", "seconds": None})
    state = Soak(Server("localhost", 1))
    state.answered, state.replies, state.unread = {"a"}, 1, 1
    assert list(soak.audited(lines[:1], state)) == list(soak.audited(lines[:2], state)) == []
    assert list(soak.audited([*lines[:1], refused, refused], state)) == []
    assert "more than once, as b" in "".join(soak.audited(lines, state))
    assert "not in it, as a" in "".join(soak.audited(lines[1:2], state))
    assert "3 lines for 1 replies" in "".join(soak.audited(lines, state))
    state.replies = 3
    assert "2 lines for 3 replies" in "".join(soak.audited(lines[:2], state))


def test_clients_ask_the_same_more_than_once() -> None:
    rng = random.Random(0)
    bodies = [json.dumps(random_fields(rng)) for _ in range(300)]
    assert 50 < len(set(bodies)) < 100
