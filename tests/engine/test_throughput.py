"""The throughput benchmark, on weights that take no time: batching pays, and nobody waits long."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks import throughput


def test_eight_at_once_against_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "tiny", "--rounds", "2", "--steps", "4", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *argv])
    throughput.main()
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert found["benchmark"] == "throughput"
    together, in_turn = found["figures"]["together"], found["figures"]["in turn"]
    assert together.keys() == in_turn.keys()
    # About twice as much, and a third of the wait; a busy machine's noise is left much room.
    assert together["canvas_tps"] > 0.5 * in_turn["canvas_tps"]
    for share in (50, 95):
        assert together[f"first_draft_p{share}_s"] < in_turn[f"first_draft_p{share}_s"]
    assert "first_draft_p95_s" in shown
