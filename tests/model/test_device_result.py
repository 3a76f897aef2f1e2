"""Results of several calculations, which the host fetches together."""

from __future__ import annotations

import pytest
import torch

from sfumato.model import devices
from sfumato.model.devices import DeviceResult, fetch_together


@pytest.mark.parametrize("wide", [torch.int64, torch.float64])
def test_results_are_those_of_each_fetched_alone(
    wide: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements of 8 bytes may stand after an odd number of 4."""
    tensors = (
        torch.tensor([[1.5, -2.0, float("inf")]]),
        torch.tensor([7, 1 << 40]).to(wide),
        torch.zeros(0, 4),
        torch.tensor([3], dtype=torch.int32),
    )
    results = [
        DeviceResult((tensor,), lambda host: [value.tolist() for value in host])
        for tensor in tensors
    ]
    expected = [[tensor.tolist()] for tensor in tensors]

    def alone(result: DeviceResult[list[object]]) -> list[object]:
        return fetch_together([result])[0]

    assert fetch_together(results) == [*map(alone, results)] == expected
    monkeypatch.setattr(devices, "_is_on_host", lambda tensor: False)
    assert fetch_together(results) == expected and fetch_together([]) == []
