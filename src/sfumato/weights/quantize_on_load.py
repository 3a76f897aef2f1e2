"""A checkpoint whose float matrices become blocks as they are read: quantized at load.

It tells formats and sizes as they will be, so that whoever asks it (for a dtype, for the memory to
come) need not know that the file holds something else. Knows no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sfumato.weights.blocks import BLOCK_FORMATS, QuantizedTensor
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.quant_recipes import TARGETS, format_of
from sfumato.weights.quantize import quantized
from sfumato.weights.tensorfile import FLOAT_FORMATS

ON_LOAD = ("q4_k", "q8_0")
"""The targets that serve for it."""


@dataclass(frozen=True)
class QuantizedCheckpoint(Checkpoint):
    """See `quantized_on_load`."""

    target: str
    device: torch.device

    def read(self, name: str) -> Tensor | QuantizedTensor:
        """As `Checkpoint.read`; a matrix that is quantized on the way is no view of the file, and
        lies on `device`. Raises ValueError, naming the tensor, for values that are not finite."""
        value = super().read(name)
        if isinstance(value, QuantizedTensor) or self.tensors[name].format in FLOAT_FORMATS:
            return value
        try:
            return quantized(name, value.to(self.device), self.target)
        except ValueError as error:
            raise ValueError(f"quantize: {self.tensors[name].file}: {error}") from error


def quantized_on_load(checkpoint: Checkpoint, target: str, device: torch.device) -> Checkpoint:
    """The checkpoint with its float matrices in the formats of a target in `ON_LOAD`; `device`
    does the work. What is in blocks already stays as it is, whatever its format.

    Raises ValueError for another target.
    """
    if target not in ON_LOAD:
        raise ValueError(f"quantize: {target!r} is none of {', '.join(ON_LOAD)}")
    values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    tensors = {name: _told(name, info, target) for name, info in checkpoint.tensors.items()}
    return QuantizedCheckpoint(**values | {"tensors": tensors}, target=target, device=device)


def _told(name: str, info: TensorInfo, target: str) -> TensorInfo:
    """What `read` will give, in the place of what the file holds."""
    block = BLOCK_FORMATS.get(format_of(name, info.shape, TARGETS[target]))
    if block is None or info.format not in FLOAT_FORMATS:
        return info
    nbytes = math.prod(info.shape) // block.block_size * block.block_bytes
    return replace(info, format=block.name, nbytes=nbytes)
