"""Which tensors of a checkpoint stay 8-bit codes: those that a GPU's kernels multiply as they are.

A narrow checkpoint's FP8 and INT8 matrices else become blocks while they are read. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfumato.ops import packing
from sfumato.ops.triton.scaled import refusal
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.narrow.join import JoinedTensor


def as_codes(checkpoint: Checkpoint, device_of: Callable[[str], torch.device]) -> Checkpoint:
    """The checkpoint, whose formats and sizes are those of codes where `read` is to give codes.

    device_of: of a canonical name, the device that the tensor goes to. Before a device's kernels
    are tested, those serve that will if their tests pass: ask again afterwards.
    """

    def stays(name: str, tensor: JoinedTensor) -> bool:
        return packing.multiplies_codes(tensor.kind, tensor.info.shape, device_of(name))

    return _with_codes(checkpoint, stays)


def as_all_codes(checkpoint: Checkpoint) -> Checkpoint:
    """As `as_codes`, for a device that need not be here, whose kernels serve FP8 and INT8."""
    return _with_codes(checkpoint, lambda _, tensor: not refusal(tensor.kind, tensor.info.shape))


def _with_codes(checkpoint: Checkpoint, stays: Callable[[str, JoinedTensor], bool]) -> Checkpoint:
    """Rows of an embedding are read one by one, and a router's product is in float32."""
    kept = {
        name: tensor.of_codes()
        for name, tensor in checkpoint.joined.items()
        if name.startswith("layers.") and ".router." not in name and stays(name, tensor)
    }
    if not kept:
        return checkpoint
    infos = {name: tensor.info for name, tensor in kept.items()}
    joined = {**checkpoint.joined, **kept}
    return replace(checkpoint, tensors={**checkpoint.tensors, **infos}, joined=joined)
