"""Audit lines in the background: what stalls, what is lost, what is there in the end."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from threading import Event

import pytest

from sfumato.engine.audit import AuditLog
from sfumato.engine.behind import Behind


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
