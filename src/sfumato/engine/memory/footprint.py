"""What a model is as far as memory goes: its shapes, and the bytes of its weights on one device.

Counted before loading from what a checkpoint's headers say, afterwards from the weights themselves.
Knows no engine: what else is needed is `estimate.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sfumato.engine.memory.device_overhead import held_bytes
from sfumato.model.codes_on_load import as_codes
from sfumato.model.layer_devices import Placement, layer_of_experts, on_one_device
from sfumato.model.loading import loaded_bytes, viewed_bytes
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.placement import cache_dtype
from sfumato.model.streamed_layers import aligned, buffers_of, kept_bytes
from sfumato.ops import gpu
from sfumato.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelFootprint:
    """A model as far as memory goes, or the part of it that is on one device."""

    config: ModelConfig  # with the layers that are on the device, one at least
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    weights: int  # bytes, loaded
    mapped: int = 0  # of these, pages of mapped files
    # Of the weights, the experts of each layer; none once it is loaded.
    experts: tuple[int, ...] = field(default=(), compare=False)
    placement: Placement | None = field(default=None, compare=False)  # None: all on the device
    kept: int = field(default=0, compare=False)  # bytes of streamed layers in the host's memory

    @property
    def is_home(self) -> bool:
        """Whether embedding, head and the state of canvases are on the device."""
        return self.placement is None or self.placement.device == self.device

    @property
    def captures(self) -> bool:
        """Whether forwards are captured as graphs there."""
        mixed = self.placement is not None and self.placement.is_mixed
        return gpu.is_gpu(self.device) and not mixed

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        cache_type: str | None = None,
        placement: Placement | None = None,
    ) -> ModelFootprint:
        """A model that is not loaded yet, but for what the placement has on other devices. Raises
        ValueError as `cache_dtype`."""
        placement = placement or on_one_device(device, len(config.layers))
        checkpoint = as_codes(checkpoint, placement.of)
        tensors = [
            (name, info)
            for name, info in checkpoint.tensors.items()
            if placement.of(name) == device
        ]
        sizes: list[int] = []
        views = 0
        experts, streamed = [0] * len(config.layers), [0] * len(config.layers)
        for name, info in tensors:
            size = loaded_bytes(name, info, device, dtype)
            if (layer := placement.streamed_layer(name)) is not None:
                streamed[layer] += aligned(size)
                continue
            sizes.append(size)
            views += viewed_bytes(name, info, device, dtype) if checkpoint.is_view(name) else 0
            if (layer := layer_of_experts(name)) is not None:
                experts[layer] += size
        layers = [size for size in streamed if size]
        return cls(
            _layers_on(config, placement, device),
            device,
            dtype,
            cache_dtype(checkpoint, placement.device, dtype, cache_type),
            held_bytes([*sizes, *buffers_of(layers)], device),
            views,
            tuple(experts),
            placement,
            kept_bytes(layers),
        )

    @classmethod
    def of_network(cls, network: Network, device: torch.device | None = None) -> ModelFootprint:
        """The part of a loaded model on a device, None for the network's own. Which of its weights
        are mapped is not known any more."""
        device, placement = device or network.device, network.placement
        config = _layers_on(network.config, placement, device)
        values: list[Any] = [*(network.head.output or ())]
        if placement.streamed:  # their weights are views of these buffers
            values += [each for streams in network.transformer.streams for each in streams.buffers]
        for name, module in network.transformer.named_modules():
            if placement.streamed_layer(f"{name}.") is None:
                values += _weights(module)
        sizes = [value.nbytes for value in values if _is_on(value, device)]
        kinds = network.dtype, network.cache_dtype, held_bytes(sizes, device)
        return cls(config, device, *kinds, placement=placement)


def _layers_on(config: ModelConfig, placement: Placement, device: torch.device) -> ModelConfig:
    """The model with the layers of a device alone; with the last one where it has none, so that a
    device with embeddings or experts is charged for a layer's keys too many rather than too few."""
    pairs = zip(config.layers, placement.layers, strict=True)
    layers = tuple(layer for layer, at in pairs if at == device)
    return replace(config, layers=layers or config.layers[-1:])


def _is_on(value: Any, device: torch.device) -> bool:
    same = (value.device.index or 0) == (device.index or 0)
    return bool(value.device.type == device.type) and same


def _weights(module: torch.nn.Module) -> list[Any]:
    values = [*module.parameters(recurse=False), *vars(module).values()]
    return [value for value in values if hasattr(value, "nbytes")]
