"""Which tensors of a checkpoint stay the file's codes: those that a GPU multiplies as they are.

A narrow checkpoint's FP8, INT8 and INT4 matrices else become the nearest blocks of a GGUF kind
while they are read.  INT4 becomes blocks here too, but with the file's own scales. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfumato.ops import packing
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
    """As `as_codes`, for a device that need not be here, whose kernels serve all kinds."""

    def stays(_: str, tensor: JoinedTensor) -> bool:
        return not packing.refusal_of_codes(tensor.kind, tensor.info.shape)

    return _with_codes(checkpoint, stays)


def _with_codes(checkpoint: Checkpoint, stays: Callable[[str, JoinedTensor], bool]) -> Checkpoint:
    """Rows of an embedding are read one by one, which blocks allow and 8-bit codes do not, and a
    router's product is in float32."""
    kept = {
        name: tensor.of_codes()
        for name, tensor in checkpoint.joined.items()
        if ".router." not in name
        and (name.startswith("layers.") or tensor.kind == "INT4")
        and stays(name, tensor)
    }
    if not kept:
        return checkpoint
    infos = {name: tensor.info for name, tensor in kept.items()}
    joined = {**checkpoint.joined, **kept}
    return replace(checkpoint, tensors={**checkpoint.tensors, **infos}, joined=joined)
