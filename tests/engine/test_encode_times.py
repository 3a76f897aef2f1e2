"""The times of encodes on a device, with stand-ins for its events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sfumato.engine.late_steps import EncodeTimes


class Event:
    """Done once the device's time has come to it."""

    now, launched = 0.0, 0.0
    lost = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.launched

    def query(self) -> bool:
        if Event.lost:
            raise RuntimeError("CUDA error: the device is lost")
        return Event.now >= self.at

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> EncodeTimes:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    for name, value in {"now": 0.0, "launched": 0.0, "lost": False}.items():
        monkeypatch.setattr(Event, name, value)
    return EncodeTimes(torch.device("cuda", 0), lambda: 0.0)


def encode(times: EncodeTimes, rows: list[Any], seconds: float) -> None:
    began = times.stamp()
    Event.launched += seconds
    times.add(rows, began)


def test_a_time_is_known_once_the_device_is_done(times: EncodeTimes) -> None:
    first: Any = object()
    second: Any = object()
    encode(times, [first, second, first], 0.25)
    encode(times, [second], 0.5)
    assert times.done() == []
    Event.now = 0.3
    assert times.done() == [((first, second), 0.25)]
    Event.now = 1.0
    assert times.done() == [((second,), 0.5)]
    assert times.done() == []


def test_a_lost_device_has_no_times(times: EncodeTimes) -> None:
    encode(times, [], 0.25)
    Event.lost = True
    assert times.done() == []
    Event.lost, Event.now = False, 1.0
    assert times.done() == []


def test_elsewhere_the_clock_counts() -> None:
    times = EncodeTimes(torch.device("cpu"), iter((1.0, 3.5)).__next__)
    times.add([], times.stamp())
    assert [seconds for _, seconds in times.done()] == [2.5]
