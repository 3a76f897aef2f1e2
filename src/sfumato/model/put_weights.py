"""Puts loaded weights into the network: where they are computed with, or into the host's memory.

Knows no checkpoints.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from sfumato.model.layer_devices import Placement
from sfumato.model.streamed_layers import HostMemory, KeptLayer, StreamedLayers
from sfumato.model.transformer import Block, Transformer
from sfumato.ops.side_copies import SideCopies, side_copies
from sfumato.weights.formats import Weight


def place(module: nn.Module, leaf: str, value: Weight) -> None:
    """Puts a weight where `module.leaf` was."""
    if isinstance(value, Tensor):
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    else:
        delattr(module, leaf)
        setattr(module, leaf, value)


class KeptWeights:
    """The weights of a network as they are put into it; those of streamed layers are kept in the
    host's memory until all are known."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._copies: dict[torch.device, SideCopies] = {}
        self._memory: dict[torch.device, HostMemory] = {}
        self._layers: dict[torch.device, dict[int, KeptLayer]] = {}

    def put(self, transformer: Transformer, name: str, value: Weight) -> None:
        """Puts a weight, as its device computes with it, where its canonical name says."""
        path, _, leaf = name.rpartition(".")
        module = transformer.get_submodule(path)
        number = self._placement.streamed_layer(name)
        if number is None:
            place(module, leaf, value)
            return
        device = self._placement.layers[number]
        if device not in self._copies:
            self._copies[device] = side_copies(device)
            self._memory[device] = HostMemory(self._copies[device])
        layers = self._layers.setdefault(device, {})
        layer = layers.setdefault(number, KeptLayer(self._memory[device]))
        layer.keep(value, partial(place, module, leaf))

    def stream(self, transformer: Transformer) -> None:
        """Makes the buffers of the streamed layers; none of them can be computed before."""
        streams = []
        for device, layers in self._layers.items():
            streams.append(StreamedLayers(device, layers, self._copies[device]))
            for number in layers:
                block = transformer.layers[number]
                assert isinstance(block, Block)
                block.present = partial(streams[-1].present, number)
        transformer.streams = tuple(streams)
