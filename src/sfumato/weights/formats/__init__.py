"""Every stored format by its name: one file each, which says all that is known of it.

`register` adds another; readers and writers of files, the loader, `ops` and the docs ask here.
`Weight` is what they make of a tensor's bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.codes import (
    CODES,
    FP8,
    INT8,
    KINDS,
    LEAST,
    MOST,
    Kind,
    ScaledTensor,
    round_rows,
)
from sfumato.weights.formats.floats import BF16, F16, F32
from sfumato.weights.formats.format import (
    BLOCKS,
    FLOAT,
    SCALED,
    Format,
    Layout,
    Published,
    QuantizedTensor,
    Stored,
    Weight,
    encoded,
    form_of,
    quantize,
    ranges_of_rows,
    tensors_of,
)
from sfumato.weights.formats.int4 import INT4
from sfumato.weights.formats.iq3_s import IQ3_S
from sfumato.weights.formats.iq3_xxs import IQ3_XXS
from sfumato.weights.formats.iq4_nl import IQ4_NL
from sfumato.weights.formats.iq4_xs import IQ4_XS
from sfumato.weights.formats.nvfp4 import NVFP4
from sfumato.weights.formats.q2_k import Q2_K
from sfumato.weights.formats.q3_k import Q3_K
from sfumato.weights.formats.q4_0 import Q4_0
from sfumato.weights.formats.q4_k import Q4_K
from sfumato.weights.formats.q5_0 import Q5_0
from sfumato.weights.formats.q5_1 import Q5_1
from sfumato.weights.formats.q5_k import Q5_K
from sfumato.weights.formats.q6_k import Q6_K
from sfumato.weights.formats.q8_0 import Q8_0

__all__ = [
    "BLOCKS",
    "CODES",
    "FLOAT",
    "FORMATS",
    "KINDS",
    "LEAST",
    "MOST",
    "SCALED",
    "Format",
    "Kind",
    "Layout",
    "Published",
    "QuantizedTensor",
    "ScaledTensor",
    "Stored",
    "Weight",
    "empty",
    "encoded",
    "float_dtype",
    "form_of",
    "is_float",
    "of_files",
    "quantize",
    "ranges_of_rows",
    "register",
    "round_rows",
    "tensors_of",
    "weight_of",
]

FORMATS: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Adds a format; returns it. Raises ValueError where its name or number is taken."""
    for other in FORMATS.values():
        if other.name == format.name or (other.ggml_type == format.ggml_type is not None):
            raise ValueError(f"{format.name}: is registered already, as {other.name}")
    FORMATS[format.name] = format
    return format


for _format in (
    *(F32, F16, BF16),
    *(Q4_0, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS),
    *(INT4, NVFP4, FP8, INT8),
):
    register(_format)


def of_files(form: str | None = None) -> dict[str, Format]:
    """The formats of tensors in files that are read one by one, of one form or of all."""
    return {
        name: format
        for name, format in FORMATS.items()
        if format.ggml_type is not None and form in (None, format.form)
    }


def is_float(name: str) -> bool:
    """Whether tensors of a format are read as plain torch tensors."""
    return float_dtype(name) is not None


def float_dtype(name: str) -> torch.dtype | None:
    """The dtype as which tensors of a format are read; None where these are no floats."""
    format = FORMATS.get(name)
    return format.dtype if format is not None and format.form == FLOAT else None


def weight_of(data: Tensor, format: Format, shape: tuple[int, ...]) -> Tensor | QuantizedTensor:
    """The tensor of bytes uint8 [n], aligned for its dtype, in a format of files: a view."""
    if format.form == FLOAT:
        return data.view(format.dtype).view(shape)
    return QuantizedTensor(data.view(*shape[:-1], -1), format, shape)


def empty(format: Format, shape: tuple[int, ...]) -> Weight:
    """Memory for a weight of a format, in the form in which such weights are read."""
    if format.form == SCALED:
        return ScaledTensor(torch.empty(shape, dtype=format.dtype), torch.empty(shape[:-1]))
    return weight_of(torch.empty(format.nbytes(shape), dtype=torch.uint8), format, shape)
