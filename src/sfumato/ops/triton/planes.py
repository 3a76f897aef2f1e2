"""Quantized weights as GPU kernels read them: planes of low bits, high bits, scales and minima.

A block of a GGUF file holds its codes, scales and minima side by side, at addresses that divide by
2 alone.  Here each kind of number has a plane of its own, whose rows are those of the matrix, so
that a kernel loads 16 bytes a thread.  The formats share this with few parameters (`Layout`),
and no number changes: unpacking gives the floats that the blocks give, bit for bit.  Needs no
Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sfumato.ops.registry import PLANES, register_form
from sfumato.ops.triton import grids
from sfumato.weights.blocks import (
    IQ4_VALUES,
    KNOWN_FORMATS,
    BlockFormat,
    QuantizedTensor,
    codes_of,
    fp4_values,
    iq4_xs_scale_codes,
    k_scale_codes,
    q3_k_scale_codes,
)

SUPER = 256
"""Elements of a row that share a base where scales have two levels."""
MOST_ROWS, MOST_COLUMNS = 1 << 30, 1 << 20
"""Of all matrices of a stack together, and of a matrix: kernels count rows in 32 bits."""
_OF_ROW = "row_scales"  # the plane with one number a row
_CHUNK = 1 << 24  # elements that are repacked at a time: bounds what that allocates beside


@dataclass(frozen=True)
class Layout:
    """How a format's numbers stand in planes.

    A value is scale · code − minimum, or + minimum where there is one level.  With two levels a
    scale is base · int8 and a minimum base · uint8, of bases float16 for SUPER elements; with one
    both are float16, or the scale, with `wide`, bfloat16.  Beside codes of two bits both factors
    have four, and share a byte, the scale's lower; beside codes of three a scale has six, 32 too
    high, whose top two are a plane.  A format with a grid has planes of its own; see `grids`. One
    of floats has codes of e2m1, a scale of e4m3 for each group, and one of float32 for the row,
    times which the groups' come.
    """

    bits: int  # of a code: 2 to 6 (3, 5 and 6 in a low and a high part), or 8: int8
    group: int = 32  # elements that share a scale
    two_levels: bool = False
    minima: bool = False
    table: bool = False  # codes are places in IQ4_VALUES
    grid: str = ""  # the format in whose grid a code is the place of four numbers
    floats: bool = False
    wide: bool = False  # scales, of one level, are bfloat16

    @property
    def number(self) -> int:
        """The constant FORMAT of a kernel; see `weights.plane_block`. None is 0."""
        kinds = (self.group == 16, self.two_levels, self.minima, self.table)
        flags = (*kinds, bool(self.grid), self.floats, self.wide)
        return self.bits + sum(16 << place for place, flag in enumerate(flags) if flag)

    @property
    def centre(self) -> int:
        """What is subtracted from a code."""
        is_signed = self.minima or self.table or self.floats or self.bits == 8
        return 0 if is_signed else 1 << (self.bits - 1)

    @property
    def low_bits(self) -> int:
        """Of a code, in the plane `low`."""
        return self.bits if self.bits in (2, 8) else 2 if self.bits == 3 else 4

    @property
    def before(self) -> int:
        """Bytes before the planes: those of the grid."""
        return grids.grid_bytes(self.grid) if self.grid else 0

    def widths(self, columns: int) -> dict[str, int]:
        """The bytes of a row of each plane, by its name, in their order in memory. A plane begins
        where the one before it ends; halves come out aligned."""
        if self.grid:
            return grids.widths(self.grid, columns)
        widths = {"low": columns * self.low_bits // 8}
        if self.bits > self.low_bits:
            widths["high"] = columns * (self.bits - self.low_bits) // 8
        each = 1 if self.two_levels or self.floats else 2
        widths["scales"] = columns // self.group * each
        if self.bits == 3:
            widths |= {"scales": columns // self.group // 2, "tops": columns // self.group // 4}
        if self.minima and self.bits > 2:
            widths["minima"] = columns // self.group * each
        if self.two_levels:
            widths["bases"] = columns // SUPER * 2
            if self.minima:
                widths["minimum_bases"] = columns // SUPER * 2
        if self.floats:
            widths[_OF_ROW] = 4
        return widths


LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(4),
    "Q5_0": Layout(5),
    "Q5_1": Layout(5, minima=True),
    "Q8_0": Layout(8),
    "Q2_K": Layout(2, group=16, two_levels=True, minima=True),
    "Q3_K": Layout(3, group=16, two_levels=True),
    "Q4_K": Layout(4, two_levels=True, minima=True),
    "Q5_K": Layout(5, two_levels=True, minima=True),
    "Q6_K": Layout(6, group=16, two_levels=True),
    "IQ3_XXS": Layout(2, two_levels=True, grid="IQ3_XXS"),
    "IQ3_S": Layout(3, two_levels=True, grid="IQ3_S"),
    "IQ4_NL": Layout(4, table=True),
    "IQ4_XS": Layout(4, two_levels=True, table=True),
    "INT4": Layout(4, wide=True),
    "NVFP4": Layout(4, group=16, floats=True),
}
"""By the name of the block format."""


OPERATIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("experts", "linear"), tuple(LAYOUTS)),
    **dict.fromkeys(("own_scores", "vocabulary_mass", "vocabulary_pass"), ("Q6_K", "Q8_0")),
}
"""The operations that serve planes, and of which formats: an embedding is Q6_K or Q8_0 in most
files, and each further format costs a start its test."""


def plane_names(operation: str) -> dict[str, str]:
    """By the name of each format, that of the twin which serves an operation with its planes."""
    return {format: plane_name(operation, format) for format in OPERATIONS[operation]}


def plane_name(operation: str, format: str) -> str:
    """Under this name an operation with planes of a format is tested, and switched off."""
    return f"{operation} {format}"


@dataclass(frozen=True)
class PlaneTensor:
    """A matrix in planes, or several of one size, stacked; or a range of a stack's matrices or of a
    matrix's rows.

    data: uint8 [bytes], the grid if there is one, and the planes of all `rows` rows; shape: in
    elements; first: the row of the planes that is the first here.
    """

    data: Tensor
    format: BlockFormat
    shape: tuple[int, ...]
    rows: int
    first: int = 0

    def __post_init__(self) -> None:
        each = sum(self.layout.widths(self.shape[-1]).values())
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert self.data.shape == (self.layout.before + self.rows * each,)
        assert 0 <= self.first <= self.first + self._own_rows <= self.rows

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.format.name]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the planes, as kernels want them."""
        return self._own_rows == self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' planes, and of the grid."""
        each = sum(self.layout.widths(self.shape[-1]).values())
        return self.layout.before + self._own_rows * each

    @property
    def _own_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @cached_property
    def planes(self) -> dict[str, Tensor]:
        """The rows' bytes of each plane, by its name: views, uint8 [rows, bytes]."""
        planes, start = {}, self.layout.before
        for name, width in self.layout.widths(self.shape[-1]).items():
            plane = self.data[start : start + self.rows * width].view(self.rows, width)
            planes[name] = plane[self.first : self.first + self._own_rows]
            start += self.rows * width
        return planes

    def __getitem__(self, index: int | slice) -> PlaneTensor:
        """Entry or range (step 1) of the first axis, without a copy.

        Raises IndexError for an entry out of range, ValueError for a step and for indexing the
        quantized axis itself.
        """
        if len(self.shape) < 2 or (isinstance(index, int) and len(self.shape) < 3):
            raise ValueError("single rows of planes do not lie apart: use index_select")
        count, *each = self.shape
        if isinstance(index, int):
            if not -count <= index < count:
                raise IndexError(f"{index}: there are {count} matrices")
            start, shape = index % count, tuple(each)
        else:
            if index.step not in (None, 1):
                raise ValueError(f"rows are taken in steps of 1, not {index.step}")
            start, stop, _ = index.indices(count)
            shape = (max(0, stop - start), *each)
        first = self.first + start * math.prod(each[:-1])
        return PlaneTensor(self.data, self.format, shape, self.rows, first)

    def index_select(self, ids: Tensor) -> PlaneTensor:
        """Copies the rows `ids` (int64 [n]) of a matrix."""
        assert len(self.shape) == 2
        return self.part_of_rows(ids, 0, self.shape[-1])

    def part_of_rows(self, ids: Tensor, first: int, end: int) -> PlaneTensor:
        """Copies columns first..end, of whole blocks, of the rows `ids` (int64 [n]) of a matrix."""
        columns = self.shape[-1]
        data = []
        for name, plane in self.planes.items():
            width = plane.shape[1]
            part = slice(first * width // columns, end * width // columns)
            data.append(plane[:, slice(None) if name == _OF_ROW else part].index_select(0, ids))
        grid = self.data[: self.layout.before]
        joined = torch.cat([grid, *(each.flatten() for each in data)])
        return PlaneTensor(joined, self.format, (len(ids), end - first), len(ids))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All elements as a new tensor of `shape`: computed in float32, then rounded to `dtype`."""
        columns = self.shape[-1]
        out = torch.empty(self._own_rows, columns, dtype=dtype, device=self.device)
        for at in _chunks(self._own_rows, columns):
            out[at] = _values({k: plane[at] for k, plane in self.planes.items()}, self.layout)
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"PlaneTensor({self.format.name}, {self.shape}, {self.device})"


register_form(PlaneTensor, PLANES)


def refusal(format: str, shape: tuple[int, ...]) -> str:
    """Why such a weight has no planes; empty where it has."""
    if format not in LAYOUTS:
        return f"{format}: is none of {', '.join(LAYOUTS)}"
    block = KNOWN_FORMATS[format].block_size
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[-1] % block:
        return f"{shape}: is no matrix, nor stack of matrices, of {format} blocks of {block}"
    if math.prod(shape[:-1]) > MOST_ROWS or shape[-1] > MOST_COLUMNS:
        return f"{shape}: has more than {MOST_ROWS} rows or {MOST_COLUMNS} columns"
    return ""


def plane_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of such a weight in planes. Raises ValueError where it has none."""
    if why := refusal(format, shape):
        raise ValueError(f"planes: {why}")
    layout = LAYOUTS[format]
    return layout.before + math.prod(shape[:-1]) * sum(layout.widths(shape[-1]).values())


def to_planes(weight: QuantizedTensor) -> PlaneTensor:
    """The blocks repacked, on their device. Raises ValueError where such a weight has no planes."""
    format, columns = weight.format, weight.shape[-1]
    rows = math.prod(weight.shape[:-1])
    size = plane_bytes(format.name, weight.shape)
    data = torch.empty(size, dtype=torch.uint8, device=weight.device)
    made = PlaneTensor(data, format, weight.shape, rows)
    if grid := made.layout.grid:
        data[: made.layout.before] = grids.grid_of(grid, data.device)
    blocks = weight.data.view(rows, -1)
    for at in _chunks(rows, columns):
        parts = _parts(format.name, blocks[at].reshape(-1, format.block_bytes))
        if "codes" in parts:
            codes = parts.pop("codes").reshape(-1, columns)
            low = made.layout.low_bits
            parts["low"] = codes if low == 8 else _joined(codes & ((1 << low) - 1), low)
            if "high" in made.planes:
                parts["high"] = _joined(codes >> low, made.layout.bits - low)
        for name, plane in made.planes.items():
            target = plane[at]
            part = parts[name].reshape(len(target), -1)
            target[:] = part[:, :4] if name == _OF_ROW else part  # which all blocks of a row repeat
    return made


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _parts(format: str, blocks: Tensor) -> dict[str, Tensor]:
    """Codes, and the bytes of scales and minima, of blocks uint8 [n, block_bytes]; with a grid, the
    bytes of all planes."""
    if LAYOUTS[format].grid:
        return grids.parts(format, blocks)
    parts = {"codes": codes_of(format, blocks)}
    if format == "Q2_K":
        halves = {"bases": blocks[:, 80:82], "minimum_bases": blocks[:, 82:]}
        return {**parts, "scales": blocks[:, :16], **halves}
    if format == "Q3_K":
        scales = q3_k_scale_codes(blocks)
        tops = _joined(scales >> 4, 2)
        return {**parts, "scales": _joined(scales & 15, 4), "tops": tops, "bases": blocks[:, 108:]}
    if format in ("Q4_K", "Q5_K"):
        scales, minima = k_scale_codes(blocks)
        halves = {"bases": blocks[:, :2], "minimum_bases": blocks[:, 2:4]}
        return {**parts, "scales": scales, "minima": minima, **halves}
    if format == "Q6_K":
        return {**parts, "scales": blocks[:, 192:208], "bases": blocks[:, 208:]}
    if format == "IQ4_XS":
        # Modulo 256: the byte of the int8 that is 32 lower.
        return {**parts, "scales": iq4_xs_scale_codes(blocks) - 32, "bases": blocks[:, :2]}
    if format == "NVFP4":
        return {**parts, "scales": blocks[:, 4:8], _OF_ROW: blocks[:, :4]}
    if format == "Q5_1":
        parts["minima"] = blocks[:, 2:4]
    return {**parts, "scales": blocks[:, :2]}


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n] below 2^bits in bytes [rows, n · bits / 8], the first one lowest."""
    parted = codes.view(len(codes), -1, 8 // bits)
    joined = parted[..., 0].clone()
    for place in range(1, 8 // bits):
        joined |= parted[..., place] << (place * bits)
    return joined


def _parted(plane: Tensor, bits: int) -> Tensor:
    """The reverse of `_joined`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return ((plane[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _halves(plane: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    return plane.clone(memory_format=torch.contiguous_format).view(dtype).float()


def _values(planes: dict[str, Tensor], layout: Layout) -> Tensor:
    """float32 [rows, columns] of planes, in the order of operations of the blocks' own floats."""
    if layout.grid:
        return grids.values(planes, layout.grid)
    low = planes["low"]
    if layout.bits == 8:
        numbers = low.view(torch.int8).float()
    else:
        codes = _parted(low, layout.low_bits)
        if "high" in planes:
            high = _parted(planes["high"], layout.bits - layout.low_bits)
            codes |= high << layout.low_bits
        numbers = codes.float() - layout.centre
        if layout.table:
            table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=low.device)
            numbers = table[codes.int()]
    if layout.floats:
        numbers = fp4_values(low.device)[codes.int()]
        groups = planes["scales"].contiguous().view(torch.float8_e4m3fn).float()
        groups *= _halves(planes[_OF_ROW], torch.float32)
        return (numbers.view(len(low), -1, layout.group) * groups[..., None]).flatten(1)
    if not layout.two_levels:
        scales = _halves(planes["scales"], torch.bfloat16 if layout.wide else torch.float16)
        values = numbers.view(len(low), -1, layout.group) * scales[..., None]
        if layout.minima:
            values += _halves(planes["minima"])[..., None]
        return values.flatten(1)
    each = SUPER // layout.group
    bases = _halves(planes["bases"]).repeat_interleave(each, dim=1)
    factors, minima = _factors(planes, layout)
    scales = bases * factors
    values = scales[..., None] * numbers.view(len(low), -1, layout.group)
    if layout.minima:
        bases = _halves(planes["minimum_bases"]).repeat_interleave(each, dim=1)
        values -= (bases * minima)[..., None]
    return values.flatten(1)


def _factors(planes: dict[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """Those of two levels, float32 [rows, groups]: of the scales, and of the minima where there are
    some."""
    scales = planes["scales"]
    if layout.bits == 2:
        return (scales & 15).float(), (scales >> 4).float()
    if layout.bits == 3:
        codes = _parted(scales, 4) | _parted(planes["tops"], 2) << 4
        return codes.float() - 32, codes
    return scales.view(torch.int8).float(), planes.get("minima", scales).float()
