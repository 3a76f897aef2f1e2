"""Torch's operations for a GPU, called directly on a CPU."""

from __future__ import annotations

import pytest
import torch
from tests.support.fake_device import DEVICE, traced
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry, torch_device


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_experts_of_fixed_size_are_the_reference(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many experts are multiplied at a time; expert 2 is chosen by no token."""
    torch.manual_seed(0)
    x, weights = torch.randn(9, 16), (torch.randn(5, 24, 16), torch.randn(5, 16, 12))
    chosen = torch.stack([torch.tensor([0, 1, 3, 4])[torch.randperm(4)[:2]] for _ in range(9)])
    shares = torch.rand(9, 2)
    monkeypatch.setattr(torch_device, "SLICE", 9 * 24 * 16 * at_once)
    with registry.reference_only():
        expected = ops.experts(x, chosen, shares, *weights)
    got = torch_device.experts(x, chosen, shares, *weights)
    torch.testing.assert_close(got, expected)


def test_experts_of_fixed_size_leave_all_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And serve where torch's grouped product would make the host wait."""
    monkeypatch.setattr(torch_device, "groups_stay_on_device", lambda device, dtype: False)
    with traced() as trace:
        shapes = (9, 16), (9, 2), (5, 24, 16), (5, 16, 12)
        x, shares, *weights = (torch.empty(*shape, device=DEVICE) for shape in shapes)
        chosen = torch.zeros(9, 2, dtype=torch.int64, device=DEVICE)
        ops.experts(x, chosen, shares, *weights)
    assert trace.operations["aten.bmm.default"] >= 2
    assert not trace.operations["aten._grouped_mm.default"]


def by_place(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """A product whose sums depend on the place of a row."""
    torch.matmul(x.double(), weight.double(), out=(made := torch.empty(out.shape).double()))
    out.copy_(made + torch.linspace(0, 1, len(x), dtype=torch.float64)[:, None])


def test_a_library_that_sums_by_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.device("cpu"), torch.float32, 24, 40
    torch_device.keeps_bits.cache_clear()
    assert torch_device.keeps_bits(*given)
    torch_device.keeps_bits.cache_clear()
    monkeypatch.setattr(torch, "mm", by_place)
    assert not torch_device.keeps_bits(*given)
    torch_device.keeps_bits.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 600])
def test_a_library_multiplies_at_one_shape(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """From aligned addresses, whatever the number of rows and wherever they stand."""
    seen, multiplied = set(), torch.mm

    def noted(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
        seen.add((x.shape, out.shape, x.data_ptr() % 64))
        multiplied(x, weight, out=out)

    weight, stored = torch.randn(24, 64), torch.randn(2 * 601, 64)
    halves = 2 - rows % 2
    odd = stored.view(-1)[4 : 4 + rows * 64].view(halves, rows // halves, 64)
    monkeypatch.setattr(torch_device, "ALIGNED", 64)  # as torch has it on a CPU
    monkeypatch.setattr(torch, "mm", noted)
    for x in (stored[:rows], stored[: 2 * rows : 2], odd):
        out = torch_device.padded_product(x, weight)
        assert out.shape == (*x.shape[:-1], 24)
        torch.testing.assert_close(out, x @ weight.T)
    assert len(seen) == 1


def test_a_cpu_needs_no_probe() -> None:
    assert torch_device.groups_stay_on_device(torch.device("cpu"), torch.float32)
