"""Audit lines in the background: what stalls, what is lost, what is there in the end."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sfumato.engine.audit import AuditLog, AuditWriter


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
    writer = AuditWriter(log)
    began = time.monotonic()
    for number in range(100):
        writer.write({"number": number})
    assert time.monotonic() - began < 8 and log.path.read_bytes() == b""
    goes_on.set()
    writer.close()
    numbers = [json.loads(line)["number"] for line in log.path.read_text().splitlines()]
    assert numbers == list(range(100))


def test_the_end_waits_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    writer = AuditWriter(log)
    writer.write({"number": 0})
    began = time.monotonic()
    writer.close(0.1)
    assert time.monotonic() - began < 8
    goes_on.set()


def test_too_many_lines_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    writer = AuditWriter(log, most=2)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            writer.write({"number": number})
    (warning,) = caplog.messages
    assert "audit.jsonl takes no lines" in warning
    goes_on.set()
    writer.close()
    assert 2 <= len(log.path.read_text().splitlines()) <= 3


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), SystemExit(1)])
def test_no_exception_ends_the_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    append = log.append

    def sometimes(data: bytes) -> None:
        if json.loads(data)["number"] % 2:
            raise error
        append(data)

    monkeypatch.setattr(log, "append", sometimes)
    writer = AuditWriter(log)
    for number in range(6):
        writer.write({"number": number})
    while writer.counts.waiting:
        time.sleep(0.005)
    assert writer.counts.alive
    writer.close()
    numbers = [json.loads(line)["number"] for line in log.path.read_text().splitlines()]
    assert numbers == [0, 2, 4]
    assert (writer.counts.errors, writer.counts.alive) == (3, False)
    assert caplog.text.count("is lost") == 1, "and the log is not flooded"
    assert type(error).__name__ in caplog.text


def test_lines_that_are_lost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    writer = AuditWriter(log, most=2)
    for number in range(10):
        writer.write({"number": number})
    assert 7 <= writer.counts.overflowed <= 8
    goes_on.set()
    writer.close()

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    log = AuditLog(tmp_path / "audit.jsonl")
    monkeypatch.setattr(log, "_append", full)
    writer = AuditWriter(log)
    writer.write({})
    writer.write({})
    writer.close()
    assert (writer.counts.unwritten, writer.counts.errors) == (2, 0)


def test_lines_that_wait_have_a_bound_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    goes_on = stalled(log, monkeypatch)
    writer = AuditWriter(log, most_bytes=2000)
    for number in range(10):
        writer.write({"number": number, "text": "x" * 900})
    assert writer.counts.overflowed == 8, "and two lines wait or are being written"
    assert 1800 < writer.counts.waiting_bytes <= 2000
    goes_on.set()
    writer.close()
    assert writer.counts.waiting_bytes == 0
    numbers = [json.loads(line)["number"] for line in log.path.read_text().splitlines()]
    assert numbers == [0, 1]


def test_a_long_line_waits_where_no_other_does(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    writer = AuditWriter(log, most_bytes=10)
    writer.write({"text": "x" * 900})
    writer.close()
    assert (len(log.path.read_bytes()), writer.counts.overflowed) == (912, 0)


def test_a_line_that_cannot_be_made_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    writer = AuditWriter(AuditLog(tmp_path / "audit.jsonl"))
    nothing: Any = None
    writer.record(nothing, nothing, nothing)
    assert writer.counts.errors == 1
    endless: dict[str, Any] = {}
    endless["self"] = endless
    writer.write(endless)
    assert writer.counts.errors == 2
    writer.close()
