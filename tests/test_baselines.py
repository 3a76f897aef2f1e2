"""The record of what requests give: it repeats itself, and says what has changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import baselines

SLICE = ["--model", "random", "--only", "cancelled"]


@pytest.fixture(autouse=True)
def loudness() -> Iterator[None]:
    """A run silences warnings."""
    log = logging.getLogger("sfumato")
    before = log.level
    yield
    log.setLevel(before)


def test_a_record_repeats_itself_and_a_change_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baselines.json"
    assert baselines.main(["record", str(file), *SLICE]) == 0
    kept = json.loads(file.read_text(encoding="utf-8"))
    name = next(name for name in kept["runs"] if name.endswith("at settled, with late steps"))
    reply = kept["runs"][name]["reply"]
    assert reply["stop_reason"] == "cancelled" and reply["tokens"]
    text, reply["text"] = reply["text"], "another"
    file.write_text(json.dumps(kept), encoding="utf-8")
    capsys.readouterr()
    assert baselines.main(["compare", str(file), *SLICE]) == 1
    line, total = capsys.readouterr().out.splitlines()
    assert line == f"{name}: reply.text was 'another' and is {text!r}"
    assert total == f"1 of {len(kept['runs'])} runs differ"


def test_differences_are_of_fields() -> None:
    before = {"text": "a", "steps": [1, 2], "share": 0.5, "old": None, "account": {"retries": 1}}
    now = {"text": "b", "steps": [1], "share": 0.50001, "new": 1, "account": {"retries": 2}}
    assert list(baselines.differences(before, now, ["account.retries"])) == [
        "text was 'a' and is 'b'",
        "steps was [1, 2] and is [1]",
        "old was None and is not there any more",
        "new was not there and is 1",
    ]
