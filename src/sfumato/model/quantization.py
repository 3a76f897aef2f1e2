"""Which format each tensor takes: in a file that is written, quantized as it is read, or left
narrow for a GPU's kernels.

Files follow llama.cpp's rule for its "mixes" (`formats`).  `quantized_on_load` gives a checkpoint
whose float matrices become blocks, or FP8, as they are read; `as_codes` one whose narrow matrices
stay FP8, INT8, INT4 or NVFP4 where kernels multiply them so, and else become the blocks nearest to
them.  Formats and sizes of these checkpoints are those of what is read, so that the choice of a
dtype and the estimate of memory need no special case.  Knows no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sfumato.ops import gpu, packing
from sfumato.ops.registry import PLANES, SCALED, kind_of
from sfumato.ops.triton import planes
from sfumato.options.table import ON_LOAD
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.files.tensorfile import Files
from sfumato.weights.formats import (
    BLOCKS,
    FORMATS,
    Format,
    QuantizedTensor,
    ScaledTensor,
    Weight,
    is_float,
    quantize,
    round_rows,
)

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

    Vectors and routers stay F32. The embedding, which mostly is the output layer too, and an output
    layer of its own take Q6_K at least.
    """
    if len(shape) < 2 or ".router." in name:
        return "F32"
    chosen = target.base
    if is_float(chosen):
        return chosen
    columns = shape[-1]
    if name in ("embed_tokens.weight", "lm_head.weight"):
        chosen = "Q6_K" if FORMATS[chosen].divides(columns) and chosen != "Q8_0" else "Q8_0"
    elif favoured and target.sensitive:
        chosen = target.sensitive
    if not FORMATS[chosen].divides(columns):
        chosen = _FALLBACKS.get(chosen, chosen)
    return chosen if FORMATS[chosen].divides(columns) else "F16"


@dataclass(frozen=True)
class QuantizedInfo(TensorInfo):
    """A matrix that becomes blocks or codes when it is read, on `device`, where it stays; of the
    floats of `source`."""

    source: TensorInfo = field(repr=False)
    device: torch.device

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return self.source.stored

    def unchanged(self) -> TensorInfo | None:
        return self.source.unchanged()

    def read(self, files: Files) -> Weight:
        """The weight. Raises ValueError, naming the tensor, for values that are not finite."""
        floats = self.source.read(files).to(self.device)
        assert isinstance(floats, Tensor)
        try:
            return quantized(floats, FORMATS[self.format])
        except ValueError as error:
            raise Refused("quantize", f"{self.file}: {self.name}: {error}") from error


def quantized_on_load(checkpoint: Checkpoint, target: str, device: torch.device) -> Checkpoint:
    """The checkpoint with its float matrices in the formats of a target in `ON_LOAD`; `device`
    does the work. What is in blocks already stays as it is, whatever its format.

    Raises ValueError for another target.
    """
    if target not in ON_LOAD:
        raise Refused("quantize", f"{target!r} is none of {', '.join(ON_LOAD)}")
    tensors = dict(checkpoint.tensors)
    for name, info in tensors.items():
        if is_float(info.format) and (format := format_on_load(name, info.shape, target)):
            given = name, info.shape, format.name, format.nbytes(info.shape), info.file
            tensors[name] = QuantizedInfo(*given, info.offset, info, device)
    return replace(checkpoint, tensors=tensors)


def quantized(floats: Tensor, format: Format) -> QuantizedTensor | ScaledTensor:
    """Floats in a format of blocks, or in FP8. Raises ValueError for values that are not finite."""
    if format.form == BLOCKS:
        return quantize(floats, format)
    held = round_rows(floats.contiguous(), "FP8")
    if not bool(held.scales.isfinite().all()):
        raise ValueError("holds values that are not finite")
    return held


def format_on_load(name: str, shape: tuple[int, ...], target: str) -> Format | None:
    """The format that a target gives a float tensor: FP8, which GGUF files have not, or what the
    target of that name in `TARGETS` gives it. None where it stays as it is (vectors, routers, odd
    widths)."""
    if target == "fp8":
        return FORMATS["FP8"] if takes_codes(name, shape) else None
    format = FORMATS[format_of(name, shape, TARGETS[target])]
    return format if format.form == BLOCKS else None


def as_codes(
    checkpoint: Checkpoint, device_of: Callable[[str], torch.device] | None = None
) -> Checkpoint:
    """The checkpoint, whose formats and sizes are those of what `read` is to give.

    device_of: of a canonical name, the device that the tensor goes to; None for a device that need
    not be here, whose kernels serve all of them. Before a device's kernels are tested, those serve
    that will if their tests pass: ask again afterwards.
    """

    def stays(name: str, info: TensorInfo) -> bool:
        if device_of is None:
            return not planes.refusal(info.format, info.shape)
        device = device_of(name)
        if info.format == "INT4" and kind_of(device) == gpu.KIND:
            return True  # torch dequantizes it without kernels; Q4_0 rounds its scales
        return packing.form_on(info.format, info.shape, device) in (PLANES, SCALED)

    # Rows of an embedding are read one by one, and a router's product is in float32.
    kept = {
        name: each
        for name, info in checkpoint.tensors.items()
        if name.startswith("layers.") and ".router." not in name
        if (each := info.unchanged()) and stays(name, each)
    }
    return replace(checkpoint, tensors={**checkpoint.tensors, **kept}) if kept else checkpoint
