"""How a loaded weight is held on a device: as stored, or repacked for the kernels that serve there.

On a CPU compiled kernels multiply panels; on a GPU kernels multiply planes, where they passed their
test for the operation and the format.  Everything else stays as it is.
"""

from __future__ import annotations

import torch

from sfumato.ops import gpu
from sfumato.ops.cpu import panels
from sfumato.ops.registry import PANELS, PLANES, is_off, kind_of
from sfumato.ops.triton import planes, serves_format
from sfumato.weights.formats import KINDS, QuantizedTensor, Weight


def packed_form(format: str, shape: tuple[int, ...], device: torch.device) -> str | None:
    """PANELS or PLANES, as which `pack` gives a weight of such a format and shape on a device;
    None where it gives the same."""
    operation = _operation(shape)
    if is_off(operation):
        return None
    if kind_of(device) == gpu.KIND:
        return PLANES if _becomes_planes(operation, format, shape, device) else None
    return PANELS if panels.packs(format, shape, device) else None


def _becomes_planes(
    operation: str, format: str, shape: tuple[int, ...], device: torch.device
) -> bool:
    """Whether a GPU's kernels take blocks for an operation, as planes."""
    is_block = format in planes.LAYOUTS and not planes.refusal(format, shape)
    return is_block and serves_format(operation, format, device)


def _operation(shape: tuple[int, ...], is_dense: bool | None = None) -> str:
    """Which operation multiplies a weight: a matrix, or a stack of them. is_dense: see `pack`."""
    return "linear" if is_dense or len(shape) == 2 else "experts"


def packs(format: str, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `pack` changes such a weight."""
    return packed_form(format, shape, device) is not None


def multiplies_codes(kind: str, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether a GPU's kernels multiply a weight of codes of this kind and shape."""
    if kind_of(device) != gpu.KIND or kind not in KINDS or planes.refusal(kind, shape):
        return False
    return serves_format(_operation(shape), kind, device)


def pack(weight: Weight, activations: str, is_dense: bool | None = None) -> Weight:
    """The weight as the device's kernels multiply it, else the same; see `panels.pack` for the
    other parameters, which are of a CPU, and what it raises."""
    operation = _operation(tuple(weight.shape), is_dense)
    if is_off(operation):
        return weight
    if kind_of(weight.device) != gpu.KIND:
        return panels.pack(weight, activations, is_dense)
    return _in_planes(weight, _operation(tuple(weight.shape)))


def _in_planes(weight: Weight, operation: str) -> Weight:
    """Blocks as planes where a GPU's kernels take them for an operation, else the same."""
    if not isinstance(weight, QuantizedTensor):
        return weight
    given = weight.format.name, weight.shape, weight.device
    return planes.to_planes(weight) if _becomes_planes(operation, *given) else weight


def packs_embedding(format: str, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `pack_embedding` changes an embedding: where a GPU's kernels make both of a pass over
    the vocabulary, products and sums of rows, from its planes."""
    is_gpu = kind_of(device) == gpu.KIND
    return is_gpu and _becomes_planes("vocabulary_pass", format, shape, device)


def pack_embedding(weight: Weight) -> Weight:
    """The embedding [vocab, hidden] as planes where that serves, else the same. Its rows are read
    one by one too, which planes allow and panels do not."""
    is_gpu = kind_of(weight.device) == gpu.KIND
    return _in_planes(weight, "vocabulary_pass") if is_gpu else weight


def packed_bytes(format: str, shape: tuple[int, ...], device: torch.device) -> int:
    """Bytes of such a weight once packed, where `packs` says that it is."""
    if kind_of(device) == gpu.KIND:
        return planes.plane_bytes(format, shape)
    return panels.packed_bytes(format, shape)
