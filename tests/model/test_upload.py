"""Uploads, with copies that happen as late as they may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sfumato.bench.subject import random_checkpoint
from sfumato.model import loading
from sfumato.model.loading import BUFFERS, Mover, load_network
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize

CPU = torch.device("cpu")


class LateCopies:
    """Each copy is made when it is waited for: a buffer that is filled too early shows."""

    def __init__(self) -> None:
        self.started = self.pending = self.most = 0

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self.started += 1
        self.pending += 1
        self.most = max(self.most, self.pending)

        def wait() -> None:
            target.copy_(source)
            self.pending -= 1

        return wait


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("uint8", "uint8"),
    ],
)
def test_tensors_arrive_whole_and_converted(stored: str, kept: str) -> None:
    copies = LateCopies()
    mover = Mover(CPU, copies, buffer=64)
    sources = [
        (torch.randn(shape) * 50).abs().to(getattr(torch, stored))
        for shape in ((5, 7, 3), (), (1,), (0, 4), (33,))
    ]
    targets = [mover.to(source.clone(), getattr(torch, kept)) for source in sources]
    assert copies.most == BUFFERS  # two under way, and no third
    mover.wait()
    assert copies.pending == 0
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(getattr(torch, kept)))


def test_quantized_blocks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    block = FORMATS["Q8_0"]
    value = quantize(torch.randn(4, 64), block)
    moved = Mover(CPU).to(value, torch.bfloat16)
    assert isinstance(moved, QuantizedTensor)
    assert moved.shape == value.shape and torch.equal(moved.data, value.data)


def test_a_network_loads_through_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: each tensor is uploaded in its dtype, and the last copies are waited for."""
    copies = LateCopies()

    class Uploading(Mover):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, copies, buffer=1 << 16)

    checkpoint = random_checkpoint("tiny", "bf16", vocab=64)
    expected = load_network(checkpoint, CPU, torch.float32).transformer.state_dict()
    monkeypatch.setattr(loading, "Mover", Uploading)
    loaded = load_network(checkpoint, CPU, torch.float32).transformer.state_dict()
    assert copies.started > len(expected) and copies.pending == 0
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name


def test_the_buffers_are_few_and_large() -> None:
    assert BUFFERS * loading.BUFFER <= 1 << 28 and loading.BUFFER % 8 == 0
