"""A denoising forward, the plain vocabulary pass and snapshots of slots leave everything on the
device, and a step takes as many operations for eight rows as for one. Traced on a device that holds
no numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.support.fake_device import DEVICE, HostTraffic, Trace, fake_device, fake_network
from tests.support.oracle import F, S, tiny_config
from torch import Tensor

from sfumato.model.adapter_files import adaptable
from sfumato.model.adapters import Adapter, LowRank
from sfumato.model.cache import KVPool, Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart

CONFIG = config_from_hf(tiny_config(canvas_length=32, num_experts=2, layer_types=[S, F]).to_dict())


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
        cls,
        rows: int,
        widths: tuple[int, ...] = (32,),
        stored: torch.dtype = torch.bfloat16,
        adapters: Sequence[int] = (),
    ) -> Step:
        """`rows` canvases of each of the widths, each width with a pool of its own. adapters: the
        numbers of those that are in use, each of which changes all that an adapter can."""
        network = fake_network(CONFIG)
        for number in adapters:
            network.transformer.attach(number, everything(CONFIG))
        parts, tokens = [], 0
        for width in widths:
            pool = KVPool(CONFIG, rows + 2, 700, stored, DEVICE)
            index = torch.arange(rows * width) if width % 32 else None
            lengths = torch.full((rows,), width)
            part = RowPart(pool, torch.arange(rows), width, lengths, index)
            parts.append(replace(part, adapters=frozenset(adapters)))
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


def everything(config: ModelConfig) -> Adapter:
    """Rank 2, of all matrices."""
    return {
        path: LowRank(torch.zeros(*at, 2, inputs), torch.zeros(*at, out, 2), 1.0)
        for path, (*at, out, inputs) in adaptable(config).items()
    }


def operations(
    rows: int,
    widths: tuple[int, ...] = (32,),
    stored: torch.dtype = torch.bfloat16,
    adapters: Sequence[int] = (),
) -> int:
    with fake_device():
        step = Step.of(rows, widths, stored, adapters)
        with Trace() as trace:
            step()
    return trace.count


def test_eight_rows_take_the_operations_of_one(note: Callable[[str], None]) -> None:
    one, eight, both = operations(1), operations(8), operations(4, (16, 32))
    note(f"operations of a forward and a pass: {one} for a row, {eight} for 8, {both} of 2 widths")
    assert eight <= 1.1 * one
    # Only attention goes by widths.
    assert both - eight < (eight - len(CONFIG.layers)) / 2


def test_rows_of_adapters_leave_everything_on_the_device() -> None:
    """With as many operations for each adapter, whatever the number of rows."""
    none, one, two = (operations(8, adapters=numbers) for numbers in ((), (1,), (1, 2)))
    assert none < one and 0.9 < (two - one) / (one - none) < 1.1
    assert operations(1, adapters=(1, 2)) >= two / 1.1


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
        first = step.network.transformer.layers[0].input_layernorm
        first.register_forward_pre_hook(lambda _, x: (planted(*x), None)[1])
        with Trace(), pytest.raises(HostTraffic, match=message):
            step()
