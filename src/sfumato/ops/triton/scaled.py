"""Which operations serve weights of 8-bit codes, on which GPUs as codes. Needs no Triton."""

from __future__ import annotations

import math

import torch

from sfumato.ops.triton.targets import architecture
from sfumato.weights.formats import MOST, Kind, ScaledTensor

KINDS: tuple[Kind, ...] = ("FP8", "INT8")
OPERATIONS = ("experts", "linear")
"""The embedding stays as it is: its rows are read one by one, and its products decide tokens."""

MOST_ROWS, MOST_COLUMNS = 1 << 30, 1 << 17
"""Of all matrices of a stack together, which kernels count in 32 bits; and of a matrix: as many
products of two codes of -128 have a sum below 2³¹."""
_ALIGNMENT = 16
_E4M3 = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures whose matrix units take e4m3 as files have it. That of gfx942 has another bias."""


def scaled_name(operation: str, kind: str) -> str:
    """Under this name an operation with weights of a kind is tested, and switched off."""
    return f"{operation} {kind}"


def scaled_names(operation: str) -> dict[str, str]:
    """By the name of each kind, that of the twin which serves an operation with its weights."""
    return {kind: scaled_name(operation, kind) for kind in KINDS}


def multiplies_codes(kind: Kind, device: torch.device) -> bool:
    """Whether a device multiplies codes by codes, rather than unpacked codes by floats."""
    return kind == "INT8" or architecture(device) in _E4M3


def refusal(kind: str, shape: tuple[int, ...]) -> str:
    """Why kernels do not take such a weight; empty where they do."""
    if kind not in MOST:
        return f"{kind}: is none of {', '.join(KINDS)}"
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[-1] % _ALIGNMENT:
        return f"{shape}: is no matrix, nor stack of matrices, of rows of {_ALIGNMENT} codes each"
    if math.prod(shape[:-1]) > MOST_ROWS or shape[-1] > MOST_COLUMNS:
        return f"{shape}: has more than {MOST_ROWS} rows or {MOST_COLUMNS} columns"
    return ""


def takes_codes(*weights: ScaledTensor) -> bool:
    """Whether kernels take these weights, which are of one kind: see `refusal`, and aligned."""
    return len({each.kind for each in weights}) == 1 and all(
        not refusal(each.kind, each.shape) and each.codes.data_ptr() % _ALIGNMENT == 0
        and each.scales.data_ptr() % _ALIGNMENT == 0
        for each in weights
    )  # fmt: skip
