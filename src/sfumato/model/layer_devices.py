"""Which part of which layer lives on which device. Knows no tensors' sizes and no files."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_EXPERTS = re.compile(r"layers\.(\d+)\.experts\.")


@dataclass(frozen=True)
class Placement:
    """The device of the network, and for each layer the device of its experts."""

    device: torch.device
    experts: tuple[torch.device, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether a forward leaves the network's device on its way."""
        return any(device != self.device for device in self.experts)

    def of(self, name: str) -> torch.device:
        """The device of the tensor of that canonical name."""
        layer = layer_of_experts(name)
        return self.device if layer is None else self.experts[layer]


def layer_of_experts(name: str) -> int | None:
    """The layer whose experts have the tensor of that canonical name; None for other tensors."""
    match = _EXPERTS.match(name)
    return None if match is None else int(match[1])


def make_placement(device: torch.device, layers: int, experts_on_cpu: int = 0) -> Placement:
    """The placement that the options describe. experts_on_cpu: of how many of the first layers the
    experts stay in the host's memory; without effect where the network is there too.

    Raises ValueError where it is no whole number from 0 to `layers`.
    """
    if type(experts_on_cpu) is not int or not 0 <= experts_on_cpu <= layers:
        raise ValueError(
            f"experts_on_cpu: must be a whole number from 0 to {layers}, the model's layers, "
            f"got {experts_on_cpu!r}"
        )
    host = torch.device("cpu") if device.type != "cpu" else device
    return Placement(device, (host,) * experts_on_cpu + (device,) * (layers - experts_on_cpu))
