"""Reads of decisions on a device: the host waits once for a chunk of all of them. Traced on a
device that holds no numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.fake_device import DEVICE, Trace, fake_device, fake_network
from tests.support.oracle import tiny_config
from torch import Tensor

from sfumato.diffusion.constraints.decision_plan import DecisionSettings, NoiseKey, Read, Target
from sfumato.diffusion.constraints.read import OpenRead, ReadChunk, run_chunks
from sfumato.diffusion.constraints.read_template import NOISE, ReadCanvas
from sfumato.model import devices
from sfumato.model.devices import DeviceResult
from sfumato.model.families.diffusion_gemma.config import config_from_hf

CONFIG = config_from_hf(tiny_config(canvas_length=32).to_dict())
CANVASES = tuple(
    ReadCanvas((NOISE, 7, NOISE, *[3] * 13), (0, 2), (labels, (9, 11)))
    for labels in ((5, 6, 8), tuple(range(70)))
)


class ReadChunks:
    """Chunks of two reads with canvases of two settings, whose numbers come from the host in a
    copy for which it does not wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given = 0
        for module in (
            "model.network",
            "model.scores",
            "model.segments",
            "diffusion.constraints.read",
            "diffusion.step.captured",
        ):
            monkeypatch.setattr(f"sfumato.{module}.to_device", self._to_device)
        monkeypatch.setattr(devices, "to_host", self._to_host)
        self.network = fake_network(CONFIG)
        (slot,) = self.network.new_slots(1, 64)
        slot.length = 20
        self.chunks = []
        with torch.device("cpu"):
            target = Target("q", 0, 0, ((0, None), (1, None), (2, None)))
            question, key = array("i", [4] * 9), NoiseKey(0, [*[1] * 20, *[4] * 9])
            for steps in (1, 3):
                settings = DecisionSettings(steps=steps, label_mass=True)
                read = Read(question, CANVASES, (target,), key, settings)
                self.chunks.append(ReadChunk(OpenRead(read, slot), 9, 2, 100))

    def _to_device(self, values: Tensor, device: torch.device) -> Tensor:
        if values.device == DEVICE:
            return values
        self.given += 1
        return torch.empty(values.shape, dtype=values.dtype, device=DEVICE)

    def _to_host(self, words: Tensor) -> tuple[Tensor, Any]:
        """The one copy, which begins while the device works."""
        host = torch.empty(words.shape, dtype=words.dtype, device="cpu")
        return host.copy_(words, non_blocking=True), None


def test_the_results_of_turns_come_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads of several steps, whose drawn tokens stay on the device."""
    waits: list[int] = []

    def no_numbers(results: Sequence[DeviceResult[Any]]) -> list[Any]:
        """The host has no numbers here: it brings them over, and leaves it at that."""
        tensors = [tensor for each in results for tensor in each.tensors]
        waits.append(len(devices._on_host(tensors)))
        raise InterruptedError

    monkeypatch.setattr("sfumato.diffusion.constraints.read.fetch_together", no_numbers)
    with fake_device():
        chunks = ReadChunks(monkeypatch)
        with Trace(copies=1) as trace, torch.device("cpu"), pytest.raises(InterruptedError):
            run_chunks(chunks.network, chunks.chunks)
    assert trace.copies == 1 and waits == [2 * (2 + 4)] and chunks.given
