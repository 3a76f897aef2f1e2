"""Which part of which layer lives on which device. Knows no tensors' sizes and no files.

A layer is its attention with its keys and values, its dense MLP, its router and its experts. The
experts may live apart from the rest. Embedding, last norm and vocabulary head belong to no layer:
they are on the network's own device, where every forward begins and ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_LAYER = re.compile(r"layers\.(\d+)\.(experts\.)?")


@dataclass(frozen=True)
class Placement:
    """The device of the network, and those of each layer and of its experts."""

    device: torch.device
    layers: tuple[torch.device, ...]
    experts: tuple[torch.device, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether a forward leaves the network's device on its way."""
        return len(self.devices) > 1

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once, the network's first."""
        return tuple(dict.fromkeys((self.device, *self.layers, *self.experts)))

    @property
    def summary(self) -> str:
        """What lives where, in words; empty where all is on one device."""
        away = [at for at in self.layers if at != self.device]
        count = len(self.layers)
        parts = [f"{away.count(at)} of {count} layers on {at}" for at in dict.fromkeys(away)]
        apart = sum(a != b for a, b in zip(self.experts, self.layers, strict=True))
        if apart:
            parts.append(f"experts of {apart} layers on the CPU")
        return ", ".join(parts)

    def of(self, name: str) -> torch.device:
        """The device of the tensor of that canonical name."""
        match = _LAYER.match(name)
        if match is None:
            return self.device
        return (self.experts if match[2] else self.layers)[int(match[1])]


def layer_of_experts(name: str) -> int | None:
    """The layer whose experts have the tensor of that canonical name; None for other tensors."""
    match = _LAYER.match(name)
    return None if match is None or not match[2] else int(match[1])


def make_placement(
    device: torch.device,
    layers: int,
    experts_on_cpu: int = 0,
    gpu_layers: int | None = None,
) -> Placement:
    """The placement that the options describe; all on `device` where they say nothing. Without
    effect where the network is in the host's memory anyway.

    gpu_layers: how many of the last layers are on the device, None for all; the first ones are on
    the CPU. experts_on_cpu: of how many of the first layers the experts stay in the host's memory.

    Both leave the first layers with the host, so that together they overlap rather than spread.
    Which end it is costs the same: hidden states go to the host and back once in a forward.

    Raises ValueError where one is no whole number from 0 to `layers`.
    """
    on_device = layers if gpu_layers is None else gpu_layers
    for name, value in (("experts_on_cpu", experts_on_cpu), ("gpu_layers", on_device)):
        if type(value) is not int or not 0 <= value <= layers:
            raise ValueError(
                f"{name}: must be a whole number from 0 to {layers}, the model's layers, "
                f"got {value!r}"
            )
    host = torch.device("cpu") if device.type != "cpu" else device
    own = (host,) * (layers - on_device) + (device,) * on_device
    return Placement(device, own, (host,) * experts_on_cpu + own[experts_on_cpu:])


def on_one_device(device: torch.device, layers: int) -> Placement:
    """All parts of a model of so many layers on one device."""
    return make_placement(device, layers)
