"""Audit lines in the background: what stalls, what is lost, what is there in the end."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sfumato.engine.audit import AuditLog
from sfumato.engine.audit_writer import Behind


def stalled(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> Event:
    """The disk stands still until the event is set."""
    goes_on, append = Event(), log._append

    def wait(data: bytes) -> None:
        goes_on.wait(10)
        append(data)

    monkeypatch.setattr(log, "_append", wait)
    return goes_on


def test_a_stalled_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    behind = Behind(log)
    began = time.monotonic()
    for number in range(100):
        behind.write({"number": number})
    assert time.monotonic() - began < 8 and log.path.read_bytes() == b""
    goes_on.set()
    behind.close()
    found = [json.loads(line)["number"] for line in log.path.read_text().splitlines()]
    assert found == list(range(100))


def test_the_end_waits_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    behind = Behind(log)
    behind.write({"number": 0})
    began = time.monotonic()
    behind.close(0.1)
    assert time.monotonic() - began < 8
    goes_on.set()


def test_too_many_lines_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    behind = Behind(log, most=2)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            behind.write({"number": number})
    (warning,) = caplog.messages
    assert "audit.jsonl takes no lines" in warning
    goes_on.set()
    behind.close()
    assert 2 <= len(log.path.read_text().splitlines()) <= 3


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), SystemExit(1)])
def test_no_exception_ends_the_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    write = log.write

    def sometimes(line: dict[str, Any]) -> None:
        if line["number"] % 2:
            raise error
        write(line)

    monkeypatch.setattr(log, "write", sometimes)
    behind = Behind(log)
    for number in range(6):
        behind.write({"number": number})
    while behind.counts.waiting:
        time.sleep(0.005)
    assert behind.counts.alive
    behind.close()
    found = [json.loads(line)["number"] for line in log.path.read_text().splitlines()]
    assert found == [0, 2, 4]
    assert (behind.counts.errors, behind.counts.alive) == (3, False)
    assert caplog.text.count("is lost") == 1, "and the log is not flooded"
    assert type(error).__name__ in caplog.text


def test_lines_that_are_lost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    behind = Behind(log, most=2)
    for number in range(10):
        behind.write({"number": number})
    assert 7 <= behind.counts.overflowed <= 8
    goes_on.set()
    behind.close()

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    log = AuditLog(tmp_path / "audit.jsonl")
    monkeypatch.setattr(log, "_append", full)
    behind = Behind(log)
    behind.write({})
    behind.write({})
    behind.close()
    assert (behind.counts.unwritten, behind.counts.errors) == (2, 0)


def test_a_line_that_cannot_be_made_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    behind = Behind(AuditLog(tmp_path / "audit.jsonl"))
    nothing: Any = None
    behind.record(nothing, nothing, nothing)
    assert behind.counts.errors == 1
    behind.close()
