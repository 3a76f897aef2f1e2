"""Weights as the compiled operations want them: panels of 16 rows, unpacked in registers.

A panel holds the codes of its rows side by side, in as many bits as the block format has. Scales
are rounded to float16 where a format's own are products of two numbers, so that a value is off by
at most 2⁻¹¹ of its scaled code and of its offset; products beyond float16's range, as only a
hostile file has them, become its largest number, while infinite ones stay infinite.  The layout is
the library's (`csrc/sfumato.h`); here panels are bytes.

A matrix may also be in panels by its columns, for sums of its rows, such as the head's soft
embeddings.  Such a panel holds int8 with a float16 scale for each column of 32 rows, and is
multiplied by int8 that is never below zero: masses, in blocks of 32 with a float32 scale each.  So
a processor without products of bfloat16 needs no float32 of the whole vocabulary.  Both are rounded
by 1/254 of the largest of their 32 at most; the relative L2 error of a sum of many rows is about
7e-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.registry import PANELS
from sfumato.weights.formats import BLOCKS, FORMATS, Format, QuantizedTensor, Stored, Weight
from sfumato.weights.formats.format import in_steps_of_1

ACTIVATIONS = ("int8", "bf16")
"""What the other factor of a product is rounded to, by its number in the library: int8 in blocks of
32 with a float32 scale each, or bfloat16."""

ROUNDING = {"int8": 2.0**-8, "bf16": 2.0**-10}
"""How far activations are off, rounded so, in L2 and relative to their norm: somewhat less than
that, so that an error under it is hidden. Of normal numbers it is 5e-3 and 1.6e-3."""

COLUMNS = 8  # SF_SIGNED_BYTES of csrc/sfumato.h: the kind of panels by columns

SMALL = 1 << 16  # elements; a smaller bfloat16 matrix is multiplied as quickly by torch


@dataclass(frozen=True, repr=False)
class PackedTensor(Stored):
    """A matrix in panels, or several of one size, stacked.

    data: uint8 [*shape[:-2], bytes of one matrix]; kind: the panels' number in the library;
    format: of what was packed; shape: in elements.
    """

    data: Tensor
    kind: int
    format: Format
    shape: tuple[int, ...]
    activations: str
    form = PANELS

    @property
    def mode(self) -> int:
        """The activations' number in the library."""
        return ACTIVATIONS.index(self.activations)

    def __getitem__(self, index: int | slice, /) -> PackedTensor:
        """A matrix, or a range (step 1) of them, without a copy."""
        if len(self.shape) < 3:
            raise ValueError("the rows of a packed matrix do not lie apart: dequantize first")
        in_steps_of_1(index, "matrices")
        data = self.data[index]
        shape = (*data.shape[:-1], *self.shape[-2:])
        return PackedTensor(data, self.kind, self.format, shape, self.activations)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All elements as a new tensor of `shape`, with the scales as rounded here."""
        matrices, rows, columns = _sizes(self.shape)
        out = torch.empty(self.shape)
        if out.numel() == 0:
            return out.to(dtype)
        library.run(
            *("sf_unpack", self.kind, self.data.data_ptr()),
            *(matrices, rows, columns, out.data_ptr()),
        )
        return out.to(dtype)

    def __repr__(self) -> str:
        return f"PackedTensor({self.format.name}, {self.shape}, {self.activations})"


def packs(format: str, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `pack` packs such a weight: all blocks on a CPU, and its larger bfloat16 matrices
    where the processor multiplies bfloat16; nothing without the library."""
    kernels = library.kernels
    if kernels is None or device.type != "cpu" or len(shape) < 2 or 0 in shape:
        return False
    if format == "BF16":
        return kernels.bf16 and math.prod(shape) >= SMALL
    return knows(FORMATS[format])


def knows(format: Format) -> bool:
    """Whether the library, which is there, unpacks the blocks of a format."""
    return format.form == BLOCKS and _kind(format) >= 0


def pack(weight: Weight, activations: str, is_dense: bool | None = None) -> Weight:
    """The weight in panels where that serves (see `packs`), else the same.

    `activations` are for the products with blocks; those with bfloat16 take bfloat16, and so do
    those with a dense matrix where AMX's tiles multiply: of many rows at once, these are quicker
    than products of int8, and more exact.  is_dense: every token is multiplied by the weight; by
    default a single matrix is dense, and a stack of them holds experts.  Panels are the process's
    own memory, where blocks and bfloat16 may have been a view of a mapped file.
    Raises ValueError for activations that are none of ACTIVATIONS.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: {activations!r} is none of {', '.join(ACTIVATIONS)}")
    if isinstance(weight, QuantizedTensor):
        data, format = weight.data, weight.format.name
    elif isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
        data, format, activations = weight, "BF16", "bf16"
    else:
        return weight
    shape = tuple(weight.shape)
    if library.kernels is not None and library.kernels.tiles:
        is_dense = len(shape) == 2 if is_dense is None else is_dense
        activations = "bf16" if is_dense else activations
    return panels(data, format, shape, activations) if packs(format, shape, data.device) else weight


def panels(data: Tensor, format: str, shape: tuple[int, ...], activations: str) -> PackedTensor:
    """Packs bytes: the blocks of a format, or bfloat16."""
    matrices, rows, columns = _sizes(shape)
    data = data.contiguous()
    out = torch.empty(*shape[:-2], packed_bytes(format, shape[-2:]), dtype=torch.uint8)
    library.run(
        *("sf_pack", FORMATS[format].ggml_type, data.data_ptr()),
        *(matrices, rows, columns, out.data_ptr()),
    )
    return PackedTensor(out, _kind(FORMATS[format]), FORMATS[format], shape, activations)


def rounding(weight: Weight, dtype: torch.dtype) -> float:
    """By how much products with a weight round activations of `dtype`, in L2 and relative to their
    norm (see ROUNDING); 0 for float32, for plain torch, and on another device than a CPU."""
    if library.kernels is None:
        return 0.0
    if isinstance(weight, PackedTensor):
        return ROUNDING[weight.activations]
    is_narrow = isinstance(weight, Tensor) and weight.device.type == "cpu"
    return ROUNDING["bf16"] if is_narrow and dtype == torch.bfloat16 else 0.0


def packed_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of the panels of such a weight."""
    matrices, rows, columns = _sizes(shape)
    each: int = library.loaded().code.sf_panel_bytes(_kind(FORMATS[format]), rows, columns)
    assert each >= 0, f"{format} {shape}: cannot be packed"
    return matrices * each


@cache
def _kind(format: Format) -> int:
    """The number of the panels of a format; negative where the library does not know it."""
    if format.ggml_type is None:
        return -1
    kind: int = library.loaded().code.sf_kind(format.ggml_type)
    return kind


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    *leading, rows, columns = shape
    return math.prod(leading), rows, columns


def packs_columns(weight: Tensor | QuantizedTensor, beside: Weight | None) -> bool:
    """Whether `pack_columns` packs a matrix that is also multiplied in the form `beside`: blocks on
    a CPU whose products are of int8, where the processor multiplies no bfloat16."""
    kernels = library.kernels
    if kernels is None or kernels.bf16 or not isinstance(weight, QuantizedTensor):
        return False
    return isinstance(beside, PackedTensor) and beside.activations == "int8"


def column_bytes(shape: tuple[int, int]) -> int:
    """Bytes of the panels of a matrix [rows, columns]."""
    rows, columns = shape
    size: int = library.loaded().code.sf_panel_bytes(COLUMNS, columns, rows)
    assert size >= 0, f"{shape}: cannot be packed by columns"
    return size


def pack_columns(weight: QuantizedTensor, spare: Tensor | None = None) -> PackedTensor:
    """The transposed matrix [columns, rows] in panels, for activations that are never below zero;
    spare: uint8, memory of `column_bytes` at least, that may be taken for it."""
    rows, columns = weight.shape
    size = column_bytes((rows, columns))
    out = torch.empty(size, dtype=torch.uint8) if spare is None else spare[:size]
    assert out.dtype == torch.uint8 and out.numel() == size and out.is_contiguous()
    data = weight.data.contiguous()
    library.run(
        *("sf_pack_columns", weight.format.ggml_type, data.data_ptr()),
        *(rows, columns, out.data_ptr()),
    )
    return PackedTensor(out, COLUMNS, weight.format, (columns, rows), "int8")
