"""A denoising forward, the plain vocabulary pass and snapshots of slots leave everything on the
device, and a step takes as many operations for eight rows as for one. Traced on a device that holds
no numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.support.fake_device import DEVICE, HostTraffic, Trace, fake_device, fake_network
from tests.support.oracle import tiny_config
from torch import Tensor

from sfumato.model.cache import KVPool, Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart

CONFIG = config_from_hf(tiny_config(canvas_length=32).to_dict())


@dataclass
class Step:
    """What a denoising step of some rows is given."""

    network: Network
    parts: list[RowPart]
    tokens: Tensor
    soft: Tensor
    temperature: Tensor
    uniform: Tensor

    @classmethod
    def of(
        cls, rows: int, widths: tuple[int, ...] = (32,), stored: torch.dtype = torch.bfloat16
    ) -> Step:
        """`rows` canvases of each of the widths, each width with a pool of its own."""
        network = fake_network(CONFIG)
        parts, tokens = [], 0
        for width in widths:
            pool = KVPool(CONFIG, rows + 2, 700, stored, DEVICE)
            index = torch.arange(rows * width) if width % 32 else None
            lengths = torch.full((rows,), width)
            parts.append(RowPart(pool, torch.arange(rows), width, lengths, index))
            tokens += rows * width
        return cls(
            network,
            parts,
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, CONFIG.hidden_size, dtype=torch.bfloat16),
            torch.ones(tokens),
            torch.zeros(tokens, dtype=torch.float64),
        )

    def __call__(self) -> None:
        hidden = self.network.denoise_batch(self.tokens, self.soft, PaddedRows(self.parts))
        self.network.head(hidden, self.temperature, self.uniform)


def operations(
    rows: int, widths: tuple[int, ...] = (32,), stored: torch.dtype = torch.bfloat16
) -> int:
    with fake_device():
        step = Step.of(rows, widths, stored)
        with Trace() as trace:
            step()
    return trace.count


def test_eight_rows_take_the_operations_of_one(note: Callable[[str], None]) -> None:
    one, eight, both = operations(1), operations(8), operations(4, (16, 32))
    note(f"operations of a forward and a pass: {one} for a row, {eight} for 8, {both} of 2 widths")
    assert eight <= 1.1 * one
    # Only attention goes by widths.
    assert both - eight < (eight - len(CONFIG.layers)) / 2


def test_a_snapshot_stays_on_the_device() -> None:
    """Taken and restored, in the slot itself and in another, whose windows it brings back."""
    with fake_device():
        pool = KVPool(CONFIG, 3, 64, torch.bfloat16, DEVICE)
        slot, other = Slot(pool, 1), Slot(pool, 2)
        slot.length = 30
        with Trace():
            snapshot = slot.snapshot()
            slot.length = 50
            slot.restore(slot, 30, snapshot)
            other.restore(slot, 30, snapshot)
            other.restore(slot, 30)
    assert snapshot.rings and all(ring.device == DEVICE for ring in snapshot.rings)


PLANTED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "cpu": (lambda x: x.cpu(), "copies"),
    "to": (lambda x: torch.zeros(3, device="cpu").to(x.device), "copies"),
    "tensor": (lambda x: torch.tensor(1.0, device=x.device), "copies"),
    "tolist": (lambda x: x.tolist(), "on the host"),
    "item": (lambda x: x.sum().item(), "on the host"),
    "bool": (lambda x: bool(x.any()), "on the host"),
    "nonzero": (lambda x: x.nonzero(), "depends on data"),
    "mask": (lambda x: x[x > 0], "depends on data"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_waits_for_the_device_is_refused(name: str) -> None:
    planted, message = PLANTED[name]
    with fake_device():
        step = Step.of(1)
        step.network.transformer.norm.register_forward_pre_hook(lambda _, x: (planted(*x), None)[1])
        with Trace(), pytest.raises(HostTraffic, match=message):
            step()
