"""Which weights GPU kernels take beside floats, and for which operations: 8-bit codes as they are,
and blocks as planes of low bits, high bits, scales and minima.

A block of a GGUF file holds its codes, scales and minima side by side, at addresses that divide by
2 alone.  Here each kind of number has a plane of its own, whose rows are those of the matrix, so
that a kernel loads 16 bytes a thread.  The formats share this with few parameters (`Layout`),
and no number changes: unpacking gives the floats that the blocks give, bit for bit.  Needs no
Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sfumato.ops.registry import PLANES
from sfumato.ops.triton.tiles import TARGETS, architecture
from sfumato.weights.formats import (
    FORMATS,
    KINDS,
    Format,
    Kind,
    Layout,
    QuantizedTensor,
    ScaledTensor,
    Stored,
)
from sfumato.weights.formats.bits import in_bytes, of_bytes
from sfumato.weights.formats.format import OF_ROW, in_steps_of_1, ranges_of_rows

MOST_ROWS, MOST_COLUMNS, MOST_CODES = 1 << 30, 1 << 20, 1 << 17
"""Rows of all matrices of a stack together, which kernels count in 32 bits; columns of a matrix;
and of one of 8-bit codes: as many products of two codes of -128 have a sum below 2³¹."""
ALIGNMENT = 16
"""Bytes of which an address and the distance of two rows are multiples: for copies by descriptor
and for loads of 16 bytes a thread."""
_CHUNK = 1 << 24  # elements that are repacked at a time: bounds what that allocates beside


LAYOUTS: Mapping[str, Layout] = {
    name: format.layout for name, format in FORMATS.items() if format.layout is not None
}
"""By the name of the format."""


OPERATIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("experts", "linear", "linear_each", "linear_gated"), (*LAYOUTS, *KINDS)),
    **dict.fromkeys(("own_scores", "vocabulary_mass", "vocabulary_pass"), ("Q6_K", "Q8_0")),
}
"""The operations that serve such weights, and of which formats: an embedding is Q6_K or Q8_0 in
most files, and each further format costs a start its test.  Of codes it stays as it is: its rows
are read one by one, and its products decide tokens."""


def twin_name(operation: str, format: str) -> str:
    """Under this name an operation with weights of a format is tested, and switched off; "": with
    floats."""
    return f"{operation} {format}" if format else operation


@dataclass(frozen=True, repr=False)
class PlaneTensor(Stored):
    """A matrix in planes, or several of one size, stacked; or a range of a stack's matrices or of a
    matrix's rows.

    data: uint8 [bytes], the planes of all `rows` rows; shape: in elements; first: the row of the
    planes that is the first here.
    """

    data: Tensor
    format: Format
    shape: tuple[int, ...]
    rows: int
    first: int = 0
    form = PLANES

    def __post_init__(self) -> None:
        each = sum(self.layout.widths(self.shape[-1]).values())
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert self.data.shape == (self.rows * each,)
        assert 0 <= self.first <= self.first + self._own_rows <= self.rows

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.format.name]

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the planes, as kernels want them."""
        return self._own_rows == self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' planes."""
        return self._own_rows * sum(self.layout.widths(self.shape[-1]).values())

    @property
    def _own_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @cached_property
    def planes(self) -> dict[str, Tensor]:
        """The rows' bytes of each plane, by its name: views, uint8 [rows, bytes]."""
        planes, start = {}, 0
        for name, width in self.layout.widths(self.shape[-1]).items():
            plane = self.data[start : start + self.rows * width].view(self.rows, width)
            planes[name] = plane[self.first : self.first + self._own_rows]
            start += self.rows * width
        return planes

    def __getitem__(self, index: int | slice, /) -> PlaneTensor:
        if len(self.shape) < 2 or (isinstance(index, int) and len(self.shape) < 3):
            raise ValueError("single rows of planes do not lie apart: use index_select")
        count, *each = self.shape
        if isinstance(index, int):
            if not -count <= index < count:
                raise IndexError(f"{index}: there are {count} matrices")
            start, shape = index % count, tuple(each)
        else:
            in_steps_of_1(index)
            start, stop, _ = index.indices(count)
            shape = (max(0, stop - start), *each)
        first = self.first + start * math.prod(each[:-1])
        return PlaneTensor(self.data, self.format, shape, self.rows, first)

    def index_select(self, dim: int, ids: Tensor, /) -> PlaneTensor:
        assert dim == 0 and len(self.shape) == 2
        return self.part_of_rows(ids, 0, self.shape[-1])

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> PlaneTensor:
        columns = self.shape[-1]
        data = []
        for name, plane in self.planes.items():
            width = plane.shape[1]
            part = slice(first * width // columns, end * width // columns)
            data.append(plane[:, slice(None) if name == OF_ROW else part].index_select(0, ids))
        joined = torch.cat([each.flatten() for each in data])
        return PlaneTensor(joined, self.format, (len(ids), end - first), len(ids))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        columns = self.shape[-1]
        out = torch.empty(self._own_rows, columns, dtype=dtype, device=self.device)
        for at in ranges_of_rows(out.shape, _CHUNK):
            planes = {name: plane[at] for name, plane in self.planes.items()}
            out[at] = self.layout.values(_codes(planes, self.layout), planes)
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"PlaneTensor({self.format.name}, {self.shape}, {self.device})"


def refusal(format: str, shape: tuple[int, ...]) -> str:
    """Why kernels do not take a weight of such blocks, as planes, or codes; empty where they do."""
    if format not in LAYOUTS and format not in KINDS:
        return f"{format}: is none of {', '.join((*LAYOUTS, *KINDS))}"
    most, block = MOST_CODES, ALIGNMENT
    if format in LAYOUTS:
        most, block = MOST_COLUMNS, FORMATS[format].block_size
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[-1] % block:
        return f"{shape}: is no matrix, nor stack of matrices, of {format} blocks of {block}"
    if math.prod(shape[:-1]) > MOST_ROWS or shape[-1] > most:
        return f"{shape}: has more than {MOST_ROWS} rows or {most} columns"
    return ""


def takes(weight: Tensor | PlaneTensor | ScaledTensor) -> bool:
    """Whether kernels can read a weight where it stands: whole, aligned, and not too large."""
    if isinstance(weight, Tensor):
        return weight.is_contiguous()
    if isinstance(weight, PlaneTensor):
        return weight.is_whole and weight.data.data_ptr() % ALIGNMENT == 0
    addresses = weight.codes.data_ptr(), weight.scales.data_ptr()
    return not refusal(weight.kind, weight.shape) and not any(at % ALIGNMENT for at in addresses)


def multiplies_codes(kind: Kind, device: torch.device) -> bool:
    """Whether a device multiplies codes by codes, rather than unpacked codes by floats."""
    name = architecture(device)
    return kind == "INT8" or (name is not None and TARGETS[name].e4m3)


def plane_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of such a weight in planes. Raises ValueError where it has none."""
    if why := "it is codes" if format in KINDS else refusal(format, shape):
        raise ValueError(f"planes: {why}")
    layout = LAYOUTS[format]
    return math.prod(shape[:-1]) * sum(layout.widths(shape[-1]).values())


def to_planes(weight: QuantizedTensor) -> PlaneTensor:
    """The blocks repacked, on their device. Raises ValueError where such a weight has no planes."""
    format, columns = weight.format, weight.shape[-1]
    rows = math.prod(weight.shape[:-1])
    size = plane_bytes(format.name, weight.shape)
    data = torch.empty(size, dtype=torch.uint8, device=weight.device)
    made = PlaneTensor(data, format, weight.shape, rows)
    blocks = weight.data.view(rows, -1)
    for at in ranges_of_rows((rows, columns), _CHUNK):
        parts = dict(made.layout.parts(blocks[at].reshape(-1, format.block_bytes)))
        codes = parts.pop("codes").reshape(-1, columns)
        low = made.layout.low_bits
        parts["low"] = codes if low == 8 else in_bytes(codes & ((1 << low) - 1), low)
        if "high" in made.planes:
            parts["high"] = in_bytes(codes >> low, made.layout.bits - low)
        for name, plane in made.planes.items():
            target = plane[at]
            part = parts[name].reshape(len(target), -1)
            target[:] = part[:, :4] if name == OF_ROW else part  # which all blocks of a row repeat
    return made


def _codes(planes: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The codes uint8 [rows, columns] of the planes of low and high bits."""
    codes = of_bytes(planes["low"], layout.low_bits) if layout.bits < 8 else planes["low"]
    if "high" in planes:
        codes |= of_bytes(planes["high"], layout.bits - layout.low_bits) << layout.low_bits
    return codes
