"""Torch's operations for a GPU, called directly on a CPU."""

from __future__ import annotations

import pytest
import torch
from tests.support.fake_device import DEVICE, traced

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


def test_a_cpu_needs_no_probe() -> None:
    assert torch_device.groups_stay_on_device(torch.device("cpu"), torch.float32)
