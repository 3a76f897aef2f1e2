"""Calls of operations with quantized weights, in planes or as 8-bit codes, for `gpu_cases.py`.

Those of FP8 and INT8 are the case's own, rounded; those in planes are random codes with scales
of a weight's size. Torch's own time, beside that of the kernels, is that of dequantizing and
multiplying.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sfumato.ops.triton.self_test import random_planes, whole_blocks
from sfumato.weights.formats import KINDS, round_rows

if TYPE_CHECKING:
    from benchmarks.gpu_cases import Sizes
    from torch import Tensor

    from sfumato.bench.step_cost import KernelCost

NAMES = {
    "experts, Q4_K": ("experts", "Q4_K"),
    "linear, Q4_K": ("linear", "Q4_K"),
    "linear, Q8_0": ("linear", "Q8_0"),
    "experts, FP8": ("experts", "FP8"),
    "linear, FP8": ("linear", "FP8"),
    "experts, INT8": ("experts", "INT8"),
    "linear, INT8": ("linear", "INT8"),
    "experts, NVFP4": ("experts", "NVFP4"),
    "linear, NVFP4": ("linear", "NVFP4"),
    "head, Q6_K": ("vocabulary_pass", "Q6_K"),
}
"""The operation of a case, and the format of its first weight."""


def in_planes(
    sizes: Sizes, operation: str, format: str, arguments: tuple[Any, ...], cost: KernelCost
) -> tuple[tuple[Any, ...], KernelCost]:
    """The arguments of a case with its weights in planes or codes, and what the call then moves."""
    places = (3, 4) if operation == "experts" else (1,)
    changed, stored = list(arguments), 0.0
    share = cost.stored / sum(arguments[place].nbytes for place in places)
    for place in places:
        weight: Tensor = arguments[place]
        if format in KINDS:
            changed[place] = round_rows(weight, KINDS[format])
            stored += share * changed[place].nbytes
            continue
        columns = weight.shape[-1]
        # Where rows do not divide into blocks of 256, a file of this format has blocks of 32.
        own = format if whole_blocks(format, columns) == columns else "Q5_0"
        changed[place] = random_planes(sizes.device, own, *weight.shape)
        stored += share * changed[place].nbytes
    return tuple(changed), replace(cost, stored=stored, products=KINDS.get(format, cost.products))
