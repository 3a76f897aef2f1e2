"""A checkpoint whose float matrices become blocks, or FP8, as they are read: quantized at load.

Its formats and sizes are those after quantization, so that the choice of a dtype and the estimate
of memory need no special case. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sfumato.model.quant_recipes import FP8, TARGETS, format_of, takes_codes
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.formats import (
    BLOCKS,
    FORMATS,
    QuantizedTensor,
    ScaledTensor,
    Stored,
    is_float,
    nbytes,
    quantize,
    round_rows,
)

ON_LOAD = ("q4_k", "q8_0", "fp8")
"""The targets that are offered for it."""


@dataclass(frozen=True)
class QuantizedCheckpoint(Checkpoint):
    """See `quantized_on_load`."""

    target: str
    device: torch.device

    def read(self, name: str) -> Tensor | Stored:
        """As `Checkpoint.read`; a matrix that is quantized on the way is no view of the file, and
        lies on `device`. Raises ValueError, naming the tensor, for values that are not finite."""
        value = super().read(name)
        if not isinstance(value, Tensor) or is_float(self.tensors[name].format):
            return value
        try:
            return quantized(name, value.to(self.device), self.target)
        except ValueError as error:
            raise Refused("quantize", f"{self.tensors[name].file}: {error}") from error


def quantized_on_load(checkpoint: Checkpoint, target: str, device: torch.device) -> Checkpoint:
    """The checkpoint with its float matrices in the formats of a target in `ON_LOAD`; `device`
    does the work. What is in blocks already stays as it is, whatever its format.

    Raises ValueError for another target.
    """
    if target not in ON_LOAD:
        raise Refused("quantize", f"{target!r} is none of {', '.join(ON_LOAD)}")
    values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    tensors = {
        name: _quantized_info(name, info, target) for name, info in checkpoint.tensors.items()
    }
    return QuantizedCheckpoint(**values | {"tensors": tensors}, target=target, device=device)


def quantized(name: str, tensor: Tensor, target: str) -> QuantizedTensor | ScaledTensor | Tensor:
    """A float tensor in the format that a target gives it, for quantizing at load.

    name: canonical; target: "fp8", or a name in `TARGETS` with one format for all matrices ("q4_k",
    "q8_0", …). A tensor that the target keeps as floats (vectors, routers, odd widths) is returned
    unchanged. Raises ValueError for another target, and for values that are not finite.
    """
    if target == FP8:
        return _as_codes(name, tensor)
    chosen = TARGETS.get(target)
    if chosen is None or chosen.sensitive is not None:
        known = ", ".join(key for key, value in TARGETS.items() if value.sensitive is None)
        known += f", {FP8}"
        raise Refused("quantize", f"{target!r} is none of {known}")
    format = FORMATS[format_of(name, tuple(tensor.shape), chosen)]
    if format.form != BLOCKS:
        return tensor
    try:
        return quantize(tensor, format)
    except ValueError as error:
        raise Refused(name, str(error)) from error


def _as_codes(name: str, tensor: Tensor) -> ScaledTensor | Tensor:
    if not takes_codes(name, tuple(tensor.shape)):
        return tensor
    held = round_rows(tensor.contiguous(), "FP8")
    if not bool(held.scales.isfinite().all()):
        raise Refused(name, "holds values that are not finite")
    return held


def _quantized_info(name: str, info: TensorInfo, target: str) -> TensorInfo:
    """The info of what `read` returns, which is not what the file holds."""
    if not is_float(info.format):
        return info
    if target == FP8:
        chosen = "FP8" if takes_codes(name, info.shape) else info.format
    else:
        chosen = format_of(name, info.shape, TARGETS[target])
    if is_float(chosen):
        return info
    return replace(info, format=chosen, nbytes=nbytes(chosen, info.shape))
