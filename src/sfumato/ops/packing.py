"""How a loaded weight is held on a device: as stored, or repacked for the kernels that serve there.

On a CPU compiled kernels multiply panels; on a GPU kernels multiply planes and 8-bit codes, where
they passed their test for the operation and the format.  Everything else stays as it is.
"""

from __future__ import annotations

import torch

from sfumato.ops import gpu
from sfumato.ops.cpu import panels
from sfumato.ops.registry import PANELS, PLANES, SCALED, is_off, kind_of
from sfumato.ops.triton import planes, serves_format
from sfumato.weights.formats import KINDS, QuantizedTensor, Weight

_IN_PANELS = ("linear", "experts")


def form_on(
    format: str, shape: tuple[int, ...], device: torch.device, operation: str | None = None
) -> str | None:
    """PANELS, PLANES or SCALED, as which a device's kernels take a weight of such a format and
    shape; None where torch takes it as it is.

    operation: which one takes the weight: None for the one that multiplies a matrix, or a stack of
    them; "" for none that may round it.
    """
    operation = _multiplying(shape) if operation is None else operation
    if not operation or is_off(operation):
        return None
    if kind_of(device) == gpu.KIND:
        serves = not planes.refusal(format, shape) and serves_format(operation, format, device)
        return (SCALED if format in KINDS else PLANES) if serves else None
    return PANELS if operation in _IN_PANELS and panels.packs(format, shape, device) else None


def _multiplying(shape: tuple[int, ...]) -> str:
    return "linear" if len(shape) == 2 else "experts"


def packs(
    format: str, shape: tuple[int, ...], device: torch.device, operation: str | None = None
) -> bool:
    """Whether `pack` changes such a weight."""
    return form_on(format, shape, device, operation) in (PANELS, PLANES)


def pack(weight: Weight, activations: str, operation: str | None = None) -> Weight:
    """The weight as the device's kernels take it (see `form_on`), else the same; see `panels.pack`
    for what is of a CPU, and what it raises.  "linear" multiplies every token by a weight, also by
    each matrix of a stack."""
    shape = tuple(weight.shape)
    operation = _multiplying(shape) if operation is None else operation
    if kind_of(weight.device) == gpu.KIND:
        if not isinstance(weight, QuantizedTensor):
            return weight
        is_packed = packs(weight.format.name, shape, weight.device, operation)
        return planes.to_planes(weight) if is_packed else weight
    takes = operation in _IN_PANELS and not is_off(operation)
    return panels.pack(weight, activations, operation == "linear") if takes else weight


def packed_bytes(format: str, shape: tuple[int, ...], device: torch.device) -> int:
    """Bytes of such a weight once packed, where `packs` says that it is."""
    if kind_of(device) == gpu.KIND:
        return planes.plane_bytes(format, shape)
    return panels.packed_bytes(format, shape)
