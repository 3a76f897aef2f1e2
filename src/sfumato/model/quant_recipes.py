"""Which format each tensor takes in a file of a given kind: llama.cpp's rule for its "mixes".

Knows canonical names and shapes; `weights/quantize.py` makes the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sfumato.weights.formats import FORMATS, is_float

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What serves where rows do not divide into blocks of 256; F16 where not even into these."""


@dataclass(frozen=True)
class QuantRecipe:
    """A kind of file. `base` is the format of most matrices, `sensitive` (None: base too) that of
    half of the V and down projections; `file_type` is GGUF's `general.file_type`."""

    base: str
    file_type: int
    sensitive: str | None = None


TARGETS: dict[str, QuantRecipe] = {
    "q4_k_m": QuantRecipe("Q4_K", 15, "Q6_K"),
    "q5_k_m": QuantRecipe("Q5_K", 17, "Q6_K"),
    "q8_0": QuantRecipe("Q8_0", 7),
    "q6_k": QuantRecipe("Q6_K", 18),
    "q5_k": QuantRecipe("Q5_K", 16),
    "q4_k": QuantRecipe("Q4_K", 14),
    "q5_0": QuantRecipe("Q5_0", 8),
    "bf16": QuantRecipe("BF16", 32),
    "f16": QuantRecipe("F16", 1),
    "f32": QuantRecipe("F32", 0),
}
"""Every target of `sfumato convert`, by name."""
FP8 = "fp8"
"""A target for quantizing at load alone: GGUF files have no such format."""


def formats(shapes: Mapping[str, tuple[int, ...]], target: QuantRecipe) -> dict[str, str]:
    """The format of every tensor: canonical name → "Q4_K", "F32", …, in the order of `shapes`.

    shapes: all tensors of one network, layers in order.
    """
    layers = 1 + max((int(m[1]) for name in shapes if (m := _LAYER.fullmatch(name))), default=-1)
    values = [name for name in shapes if name.endswith("v_proj.weight")]
    chosen = {}
    for name, shape in shapes.items():
        layer = _LAYER.fullmatch(name)
        favoured = False
        if layer and layer[2] in ("mlp.down_proj.weight", "experts.down_proj"):
            favoured = _more_bits(int(layer[1]), layers)
        elif layer and layer[2] == "self_attn.v_proj.weight":
            # Counted among themselves, for full layers have none.
            favoured = _more_bits(values.index(name), len(values))
        chosen[name] = format_of(name, shape, target, favoured)
    return chosen


def takes_codes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the target FP8 rounds a tensor: matrices of attention, of the dense part and of the
    experts of each layer, as published checkpoints have them.

    The embedding stays as it is, whose products decide tokens and whose rows are read one by one;
    so do routers, whose choice is discrete, and self-conditioning, which every position of every
    step goes through, and which is less than a thousandth of the weights. So does what does not
    divide into rows of 16 codes, as kernels read them."""
    match = _LAYER.fullmatch(name)
    multiplies = match is not None and not match[2].startswith("router.")
    return multiplies and len(shape) >= 2 and shape[-1] % 16 == 0


def takes_int4(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is INT4 in the published w4a16 checkpoints: matrices of attention and of the
    experts of each layer. The dense part is small, and stays as it is there."""
    match = _LAYER.fullmatch(name)
    is_narrow = match is not None and match[2].startswith(("self_attn.", "experts."))
    return is_narrow and len(shape) >= 2 and shape[-1] % 32 == 0


def _more_bits(index: int, count: int) -> bool:
    """llama.cpp's choice of half of the layers: the first and the last eighth, and every third."""
    first = count // 8
    return index < first or index >= 7 * count // 8 or (index - first) % 3 == 2


def format_of(
    name: str, shape: tuple[int, ...], target: QuantRecipe, favoured: bool = False
) -> str:
    """The format of one tensor; `favoured` where the target's mix has it among the sensitive ones.

    Vectors and routers stay F32. The embedding, which is the output head too, takes Q6_K at least.
    """
    if len(shape) < 2 or ".router." in name:
        return "F32"
    chosen = target.base
    if is_float(chosen):
        return chosen
    columns = shape[-1]
    if name == "embed_tokens.weight":
        chosen = "Q6_K" if FORMATS[chosen].divides(columns) and chosen != "Q8_0" else "Q8_0"
    elif favoured and target.sensitive:
        chosen = target.sensitive
    if not FORMATS[chosen].divides(columns):
        chosen = _FALLBACKS.get(chosen, chosen)
    return chosen if FORMATS[chosen].divides(columns) else "F16"
