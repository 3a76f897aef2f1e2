"""Which tensors of a narrow checkpoint stay as they are: those that a GPU's kernels multiply so.

FP8 and INT8 matrices stay codes, NVFP4 ones get planes of their own, or, where activations are to
be FP4 too, stay codes; else they become the blocks nearest to them while they are read. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from sfumato.ops import gpu, packing
from sfumato.ops.registry import PLANES, kind_of
from sfumato.ops.triton import planes, scaled
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.narrow.join import JoinedTensor
from sfumato.weights.scaled import CODES
from sfumato.weights.tensorfile import TensorInfo

FP4 = "fp4"
"""The activations with which NVFP4 stays codes."""


def as_codes(
    checkpoint: Checkpoint, device_of: Callable[[str], torch.device], activations: str = "int8"
) -> Checkpoint:
    """The checkpoint, whose formats and sizes are those of what `read` is to give.

    device_of: of a canonical name, the device that the tensor goes to; activations: one of
    `ops.ACTIVATIONS`. Before a device's kernels are tested, those serve that will if their tests
    pass: ask again afterwards.
    """

    def stays(name: str, info: TensorInfo) -> bool:
        device = device_of(name)
        if info.format in CODES:
            return packing.multiplies_codes(info.format, info.shape, device)
        if info.format == "INT4" and kind_of(device) == gpu.KIND:
            return True  # torch dequantizes it without kernels; Q4_0 rounds its scales
        return packing.packed_form(info.format, info.shape, device) == PLANES

    return _with_codes(checkpoint, stays, activations == FP4)


def check_fp4(checkpoint: Checkpoint, devices: Iterable[torch.device]) -> None:
    """Raises ValueError where no matrix of a checkpoint, as `as_codes` gave it, is multiplied by
    activations in FP4 on these devices: why not, and what to do."""
    if any(info.format == "FP4" for info in checkpoint.tensors.values()):
        return
    named = ", ".join(str(device) for device in devices)
    if all(each.of_fp4() is None for each in checkpoint.joined.values()):
        why = f"{checkpoint.path} has no matrices of NVFP4"
    elif not any(scaled.takes_kind("FP4", device) for device in devices):
        why = f"{named}: has no matrix units for FP4, as NVIDIA's Blackwell has"
    else:
        why = f"its kernels do not serve {named}; `sfumato doctor --verbose` says more"
    raise ValueError(f"activations: 'fp4' cannot be had: {why}. Leave it out")


def as_all_codes(checkpoint: Checkpoint, activations: str = "int8") -> Checkpoint:
    """As `as_codes`, for a device that need not be here, whose kernels serve all of them."""

    def stays(_: str, info: TensorInfo) -> bool:
        refusal = scaled.refusal if info.format in CODES else planes.refusal
        return not refusal(info.format, info.shape)

    return _with_codes(checkpoint, stays, activations == FP4)


def _with_codes(
    checkpoint: Checkpoint, stays: Callable[[str, TensorInfo], bool], fp4: bool = False
) -> Checkpoint:
    """Rows of an embedding are read one by one, and a router's product is in float32. fp4: NVFP4
    is rather codes than planes."""

    def kept_as(name: str, tensor: JoinedTensor) -> JoinedTensor | None:
        unchanged = tensor.of_codes() if tensor.kind else tensor.of_plane_blocks()
        forms = (tensor.of_fp4() if fp4 else None, unchanged)
        return next((each for each in forms if each and stays(name, each.info)), None)

    as_kept = {
        name: kept_as(name, tensor)
        for name, tensor in checkpoint.joined.items()
        if name.startswith("layers.") and ".router." not in name
    }
    kept = {name: each for name, each in as_kept.items() if each}
    if not kept:
        return checkpoint
    infos = {name: tensor.info for name, tensor in kept.items()}
    joined = {**checkpoint.joined, **kept}
    return replace(checkpoint, tensors={**checkpoint.tensors, **infos}, joined=joined)
