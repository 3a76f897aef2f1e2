"""Which tensors of a narrow checkpoint stay as they are: those that a GPU's kernels multiply so.

FP8 and INT8 matrices stay 8-bit codes, NVFP4 ones get planes of their own; else they become the
blocks nearest to them while they are read. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfumato.ops import gpu, packing
from sfumato.ops.registry import PLANES, kind_of
from sfumato.ops.triton import planes, scaled
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.files.tensorfile import TensorInfo
from sfumato.weights.formats import CODES


def as_codes(checkpoint: Checkpoint, device_of: Callable[[str], torch.device]) -> Checkpoint:
    """The checkpoint, whose formats and sizes are those of what `read` is to give.

    device_of: of a canonical name, the device that the tensor goes to. Before a device's kernels
    are tested, those serve that will if their tests pass: ask again afterwards.
    """

    def stays(name: str, info: TensorInfo) -> bool:
        device = device_of(name)
        if info.format in CODES:
            return packing.multiplies_codes(info.format, info.shape, device)
        if info.format == "INT4" and kind_of(device) == gpu.KIND:
            return True  # torch dequantizes it without kernels; Q4_0 rounds its scales
        return packing.packed_form(info.format, info.shape, device) == PLANES

    return _with_codes(checkpoint, stays)


def as_all_codes(checkpoint: Checkpoint) -> Checkpoint:
    """As `as_codes`, for a device that need not be here, whose kernels serve all of them."""

    def stays(_: str, info: TensorInfo) -> bool:
        refusal = scaled.refusal if info.format in CODES else planes.refusal
        return not refusal(info.format, info.shape)

    return _with_codes(checkpoint, stays)


def _with_codes(checkpoint: Checkpoint, stays: Callable[[str, TensorInfo], bool]) -> Checkpoint:
    """Rows of an embedding are read one by one, and a router's product is in float32."""
    unchanged = {
        name: tensor.of_codes() if tensor.kind else tensor.of_plane_blocks()
        for name, tensor in checkpoint.joined.items()
        if name.startswith("layers.") and ".router." not in name
    }
    kept = {name: each for name, each in unchanged.items() if each and stays(name, each.info)}
    if not kept:
        return checkpoint
    infos = {name: tensor.info for name, tensor in kept.items()}
    joined = {**checkpoint.joined, **kept}
    return replace(checkpoint, tensors={**checkpoint.tensors, **infos}, joined=joined)
