"""Which operations serve weights of codes, on which GPUs as codes. Needs no Triton."""

from __future__ import annotations

import math

import torch

from sfumato.ops.triton.targets import architecture
from sfumato.weights.scaled import MOST, Kind, ScaledTensor

KINDS: tuple[Kind, ...] = ("FP8", "INT8", "FP4")
OPERATIONS = ("experts", "linear")
"""The embedding stays as it is: its rows are read one by one, and its products decide tokens."""

MOST_ROWS, MOST_COLUMNS = 1 << 30, 1 << 17
"""Of all matrices of a stack together, which kernels count in 32 bits; and of a matrix: as many
products of two codes of -128 have a sum below 2³¹."""
_ALIGNMENT = 16
_MULTIPLIED: dict[Kind, tuple[str, ...]] = {
    "FP8": ("sm_89", "sm_90", "sm_100", "sm_120"),
    "FP4": ("sm_100", "sm_120"),
}
"""Architectures whose matrix units take e4m3 as files have it, where that of gfx942 has another
bias; and those whose units take e2m1, with a scale of e4m3 for 16."""


def scaled_name(operation: str, kind: str) -> str:
    """Under this name an operation with weights of a kind is tested, and switched off."""
    return f"{operation} {kind}"


def scaled_names(operation: str) -> dict[str, str]:
    """By the name of each kind, that of the twin which serves an operation with its weights."""
    return {kind: scaled_name(operation, kind) for kind in KINDS}


def multiplies_codes(kind: Kind, device: torch.device) -> bool:
    """Whether a device multiplies codes by codes, rather than unpacked codes by floats."""
    return kind == "INT8" or architecture(device) in _MULTIPLIED[kind]


def takes_kind(kind: str, device: torch.device) -> bool:
    """Whether there are kernels for weights of a kind on a device: FP4 is multiplied or nothing,
    since planes of the same numbers are unpacked."""
    return kind in ("FP8", "INT8") or (kind == "FP4" and multiplies_codes("FP4", device))


def refusal(kind: str, shape: tuple[int, ...]) -> str:
    """Why kernels do not take such a weight; empty where they do."""
    if kind not in MOST:
        return f"{kind}: is none of {', '.join(KINDS)}"
    each = _ALIGNMENT * 2 if kind == "FP4" else _ALIGNMENT
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[-1] % each:
        return f"{shape}: is no matrix, nor stack of matrices, of rows of {each} codes each"
    if math.prod(shape[:-1]) > MOST_ROWS or shape[-1] > MOST_COLUMNS:
        return f"{shape}: has more than {MOST_ROWS} rows or {MOST_COLUMNS} columns"
    return ""


def takes_codes(*weights: ScaledTensor) -> bool:
    """Whether kernels take these weights, which are of one kind: see `takes_kind` and `refusal`,
    and aligned."""
    first = weights[0]
    if any(each.kind != first.kind for each in weights) or not takes_kind(first.kind, first.device):
        return False
    parts = [part for each in weights for part in (each.codes, each.groups, each.scales)]
    aligned = all(part is None or part.data_ptr() % _ALIGNMENT == 0 for part in parts)
    return aligned and not any(refusal(each.kind, each.shape) for each in weights)
