"""Which part of which layer lives on which device. Knows no tensors' sizes and no files.

A layer is its attention with its keys and values, its dense MLP, its router and its experts. The
experts may live apart from the rest. Embedding, last norm and vocabulary head belong to no layer:
they are on the network's own device, where every forward begins and ends.

A layer may be streamed: its device computes it and has its keys and values, and its weights wait in
the host's memory (`streamed_layers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sfumato.options.table import OTHER_LAYERS
from sfumato.refused import Refused

_LAYER = re.compile(r"layers\.(\d+)\.(experts\.)?")


@dataclass(frozen=True)
class Placement:
    """The device of the network, and those of each layer and of its experts."""

    device: torch.device
    layers: tuple[torch.device, ...]
    experts: tuple[torch.device, ...]
    streamed: tuple[int, ...] = ()  # the layers whose weights are in the host's memory

    @property
    def is_mixed(self) -> bool:
        """Whether a forward leaves the network's device on its way, or waits for weights."""
        return len(self.devices) > 1 or bool(self.streamed)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once, the network's first."""
        return tuple(dict.fromkeys((self.device, *self.layers, *self.experts)))

    @property
    def leaves_layers(self) -> bool:
        """Whether a network on another device leaves layers with the CPU."""
        return self.device.type != "cpu" and any(at.type == "cpu" for at in self.layers)

    @property
    def summary(self) -> str:
        """What is computed where, in words; empty where all is on one device."""
        away = [at for at in self.layers if at != self.device]
        count = len(self.layers)
        parts = [f"{away.count(at)} of {count} layers on {at}" for at in dict.fromkeys(away)]
        apart = sum(a != b for a, b in zip(self.experts, self.layers, strict=True))
        if apart:
            parts.append(f"experts of {apart} layers on the CPU")
        return ", ".join(parts)

    def of(self, name: str) -> torch.device:
        """The device that computes with the tensor of that canonical name."""
        match = _LAYER.match(name)
        if match is None:
            return self.device
        return (self.experts if match[2] else self.layers)[int(match[1])]

    def streamed_layer(self, name: str) -> int | None:
        """The streamed layer whose weights have the tensor of that canonical name; None for other
        tensors, and for experts that stay with another device."""
        match = _LAYER.match(name)
        if match is None or (layer := int(match[1])) not in self.streamed:
            return None
        apart = match[2] and self.experts[layer] != self.layers[layer]
        return None if apart else layer


def layer_of_experts(name: str) -> int | None:
    """The layer whose experts have the tensor of that canonical name; None for other tensors."""
    match = _LAYER.match(name)
    return None if match is None or not match[2] else int(match[1])


def make_placement(
    device: torch.device,
    layers: int,
    experts_on_cpu: int = 0,
    gpu_layers: int | None = None,
    split: Sequence[int] | None = None,
    other_layers: str = "cpu",
) -> Placement:
    """The placement that the options describe; all on `device` where they say nothing. Without
    effect where the network is in the host's memory anyway.

    gpu_layers: how many of the last layers are on the device, None for all; the first ones are on
    the CPU, or streamed to the device. experts_on_cpu: of how many of the first layers the experts
    stay in the host's memory.
    split: how many of the layers on devices each of several cards has, in the order of the layers;
    the first card is `device`, the others have the numbers after its number. other_layers: a name
    of OTHER_LAYERS, what becomes of the layers that `gpu_layers` leaves: the CPU runs them, also
    for "auto" until that has been tried, or they are streamed.

    Both counts leave the first layers with the host, so that together they overlap rather than
    spread. Which end it is costs the same: hidden states go to the host and back once in a forward.

    Raises ValueError where a count is no whole number from 0 to `layers`, where a split has a card
    without layers or another sum than the layers on devices, and for another name.
    """
    on_device = layers if gpu_layers is None else gpu_layers
    for name, value in (("experts_on_cpu", experts_on_cpu), ("gpu_layers", on_device)):
        if type(value) is not int or not 0 <= value <= layers:
            raise Refused(
                name,
                f"must be a whole number from 0 to {layers}, the model's layers, got {value!r}",
            )
    if other_layers not in OTHER_LAYERS:
        names = ", ".join(OTHER_LAYERS)
        raise Refused("other_layers", f"{other_layers!r} is none of {names}")
    counts = _checked_split([on_device] if split is None else split, on_device, split is not None)
    if device.type == "cpu":
        return Placement(device, (device,) * layers, (device,) * layers)
    host, left = torch.device("cpu"), layers - on_device
    is_streamed = other_layers == "stream"
    own = [device if is_streamed else host] * left
    for card, count in enumerate(counts):
        number = (device.index or 0) + card
        own += [torch.device(device.type, number) if card else device] * count
    experts = (host,) * experts_on_cpu + tuple(own[experts_on_cpu:])
    return Placement(device, tuple(own), experts, tuple(range(left)) if is_streamed else ())


def _checked_split(counts: Sequence[int], layers: int, given: bool) -> Sequence[int]:
    """The layers of each card. Raises ValueError where one that a user gave is wrong."""
    good = all(type(count) is int and count >= 1 for count in counts) and sum(counts) == layers
    if given and not good:
        raise Refused(
            "split",
            f"must be numbers of layers from 1 on, for each card one, {layers} in all, got "
            f"{str(list(counts))[:60]}",
        )
    return counts
