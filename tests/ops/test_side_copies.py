"""Copies on a side stream: in which order streams and events are used, with streams that record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato.ops import side_copies
from sfumato.ops.side_copies import OnSideStream, SideCopies

CPU, META = torch.device("cpu"), torch.device("meta")


class Recorder:
    """Stands for torch's streams, and writes down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        recorder = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                recorder.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: str) -> None:
                recorder.log.append(f"{self.name} waits for {event}")

            def record_event(self) -> str:
                recorder.log.append(f"{self.name} records")
                return "the copy"

            def __enter__(self) -> None:
                recorder.log.append(f"{self.name} is current")

            def __exit__(self, *_: object) -> None:
                recorder.log.append(f"{self.name} was current")

        self.stream = Stream
        self.current = Stream(name="work")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch, "Stream", recorder.stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: recorder.current)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda _, stream: recorder.log.append("memory is the side's too")
    )
    return recorder


def test_a_copy_waits_for_work_and_later_work_for_the_copy(recorder: Recorder) -> None:
    copies = OnSideStream(META)
    target = torch.zeros(6, dtype=torch.uint8)
    sources = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)]
    wait = copies.start(target, sources)
    assert target.tolist() == [1, 2, 3, 0, 0, 0]
    assert recorder.log == [
        "side waits for work",
        "side is current",
        "side was current",
        "side records",
        "memory is the side's too",
    ]
    wait()
    assert recorder.log[5:] == ["work waits for the copy"]


def test_memory_that_cannot_be_page_locked(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, locks = torch.empty, []

    def empty(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        locks.append(pin_memory)
        if pin_memory and len(locks) > 1:
            raise RuntimeError("CUDA error: out of memory")
        return make(*size, **how)

    monkeypatch.setattr(torch, "empty", empty)
    copies = OnSideStream(META)
    pieces = [copies.memory(8) for _ in range(3)]
    assert [piece.device for piece in pieces] == [CPU] * 3
    assert locks == [True, True, False, False] and len(caplog.records) == 1


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def have(kind: str) -> None:
        device = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)

    return have


def test_devices_without_streams_copy_in_order(
    monkeypatch: pytest.MonkeyPatch, accelerator: Callable[[str], None]
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("this backend makes no streams")

    monkeypatch.setattr(torch, "Stream", refuse)
    accelerator("mps")
    for device in (CPU, torch.device("mps"), torch.device("cuda")):
        copies = side_copies.side_copies(device)
        assert isinstance(copies, SideCopies)
    target, source = torch.zeros(3, dtype=torch.uint8), copies.memory(3).fill_(7)
    copies.start(target, [source])()
    assert torch.equal(target, source)


def test_devices_with_streams_copy_beside(
    recorder: Recorder, accelerator: Callable[[str], None]
) -> None:
    accelerator("xpu")
    assert isinstance(side_copies.side_copies(torch.device("xpu")), OnSideStream)
