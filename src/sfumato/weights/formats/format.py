"""What a stored format is: its layout, how bytes become numbers and back, how kernels unpack it;
and one weight, however its numbers are stored: what the network, `ops` and the loader ask of it.

Each format is one value in a file of this folder; `FORMATS` in `__init__.py` has all of them. Float
tensors of torch are weights as they are. The others are dataclasses of tensors with one base,
`Stored`: blocks (`QuantizedTensor`), 8-bit codes with scales, and what kernels of a device read
these from. Code asks `form` which of them a function serves. Blocks become floats, and floats
blocks, in chunks, so that temporaries stay small whatever the tensor's size. Knows no files of a
checkpoint and no layers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

import torch
from torch import Tensor

from sfumato.weights.formats.bits import floats, on_device

Form = Literal["float", "blocks", "scaled"]

FLOAT: Form = "float"
BLOCKS: Form = "blocks"
SCALED: Form = "scaled"
"""How a weight of a format is read: as a float tensor, as blocks of codes with scales, or as 8-bit
codes with a scale for each row."""

SUPER = 256
"""Elements of a row that share a base where scales have two levels."""
OF_ROW = "row_scales"
"""The plane with one number a row."""


@dataclass(frozen=True)
class Layout:
    """How a format's numbers stand in planes, as the kernels of a GPU unpack them.

    A value is scale · code − minimum, or + minimum where there is one level.  With two levels a
    scale is base · int8 and a minimum base · uint8, of bases float16 for SUPER elements; with one
    both are float16, or the scale, with `wide`, bfloat16.  Beside codes of two bits both factors
    have four, and share a byte, the scale's lower.  One of floats has codes of e2m1, a scale of
    e4m3 for each group, and one of float32 for the row, times which the groups'
    come; their table is that of NVFP4.

    parts: blocks uint8 [n, block_bytes] → "codes" in the order of the elements, uint8
    [n, block_size], and the bytes of the planes of scales, bases and minima by their names.
    halves: at which bytes of a block its float16 numbers stand, or its bfloat16 one; unit: what
    they are for random codes that make numbers of about 1.  Tests of kernels make blocks by both.
    """

    bits: int  # of a code: 2 to 6 (3, 5 and 6 in a low and a high part), or 8: int8
    parts: Callable[[Tensor], Mapping[str, Tensor]] = field(repr=False)
    unit: float
    halves: tuple[int, ...] = (0,)
    group: int = 32  # elements that share a scale
    two_levels: bool = False
    minima: bool = False
    table: tuple[float, ...] = ()  # codes are places in it; kernels know that of IQ4_NL
    floats: bool = False
    wide: bool = False  # scales, of one level, are bfloat16

    @property
    def number(self) -> int:
        """The constant FORMAT of a kernel; see `weights.plane_rows`. None is 0."""
        levels = self.group == 16, self.two_levels, self.minima
        flags = (*levels, bool(self.table) and not self.floats, self.floats, self.wide)
        return self.bits + sum(16 << place for place, flag in enumerate(flags) if flag)

    @property
    def centre(self) -> int:
        """What is subtracted from a code."""
        is_signed = self.minima or self.table or self.bits == 8
        return 0 if is_signed else 1 << (self.bits - 1)

    @property
    def low_bits(self) -> int:
        """Bits of a code in the plane `low`."""
        return self.bits if self.bits in (2, 8) else 2 if self.bits == 3 else 4

    def widths(self, columns: int) -> dict[str, int]:
        """The bytes of a row of each plane, by its name, in their order in memory. A plane begins
        where the one before it ends; halves come out aligned."""
        widths = {"low": columns * self.low_bits // 8}
        if self.bits > self.low_bits:
            widths["high"] = columns * (self.bits - self.low_bits) // 8
        each = 1 if self.two_levels or self.floats else 2
        widths["scales"] = columns // self.group * each
        if self.minima and self.bits > 2:
            widths["minima"] = columns // self.group * each
        if self.two_levels:
            widths["bases"] = columns // SUPER * 2
            if self.minima:
                widths["minimum_bases"] = columns // SUPER * 2
        if self.floats:
            widths[OF_ROW] = 4
        return widths

    def __call__(self, blocks: Tensor) -> Tensor:
        """uint8 [n, block_bytes] → float32 [n, block_size]."""
        parts = self.parts(blocks)
        return self.values(parts["codes"], parts)

    def values(self, codes: Tensor, planes: Mapping[str, Tensor]) -> Tensor:
        """float32 [n, columns] of codes uint8 [n, columns] and the bytes of the other planes, in
        the order of the float operations of ggml, or of the publishers' programs."""
        if self.bits == 8:
            numbers = codes.view(torch.int8).float()
        elif self.table:
            numbers = on_device(self.table, codes.device)[codes.int()]
        else:
            numbers = codes.float().sub_(self.centre)
        numbers = numbers.view(len(codes), -1, self.group)
        if self.two_levels:
            factors, minima = planes["scales"].view(torch.int8), planes.get("minima")
            if self.bits == 2:
                factors, minima = planes["scales"] & 15, planes["scales"] >> 4
            values = numbers.mul_(_products(planes["bases"], factors))
            if minima is not None:
                values -= _products(planes["minimum_bases"], minima)
            return values.flatten(1)
        if self.floats:
            scales = floats(planes["scales"], torch.float8_e4m3fn)
            scales *= floats(planes[OF_ROW], torch.float32)
        else:
            scales = floats(planes["scales"], torch.bfloat16 if self.wide else torch.float16)
        values = numbers.mul_(scales[..., None])
        if self.minima:
            values += floats(planes["minima"])[..., None]
        return values.flatten(1)


def _products(bases: Tensor, factors: Tensor) -> Tensor:
    """Float16 bases, a byte each half, times the factors [n, groups] that share each: float32
    [n, groups, 1]."""
    wide = floats(bases)[..., None]
    return (wide * factors.float().unflatten(1, (wide.shape[1], -1))).view(len(bases), -1, 1)


@dataclass(frozen=True)
class Published:
    """How published safetensors checkpoints have a narrow format.

    codes: the format of the codes in a file's header; per_byte: how many stand in a byte;
    numbers: codes uint8 → a new float32 [rows, columns], before scales.  nearest: the block formats
    nearest to the values, the first of which that divides the rows is taken, each with what makes
    its blocks of codes and float32 scales [rows, groups]; None: the values are quantized.
    unchanged: codes, scales float32 [1 or rows, groups], or those of groups and the matrix's own →
    blocks of the format itself.
    """

    codes: str
    per_byte: int
    numbers: Callable[[Tensor], Tensor]
    nearest: tuple[tuple[Format, Callable[[Tensor, Tensor], Tensor] | None], ...]
    unchanged: Callable[[Tensor, Tensor, float], Tensor] | None = None


@dataclass(frozen=True)
class Format:
    """One stored format: `block_bytes` bytes hold `block_size` consecutive elements of a row, and
    `row_bytes` more belong to a row.

    dequantize: uint8 [n, block_bytes] → float32 [n, block_size]; a `Layout`, or a function where
    none can say it.  encode: the way back, where it is
    written; raises ValueError for values that the format cannot hold.  dtype: torch's own for
    floats and codes.  ggml_type: the number in GGUF files, by which a CPU's library knows it too
    (`csrc/blocks.h`); None: no file has such blocks.  published: how narrow checkpoints have it.
    """

    name: str
    block_size: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor] = field(repr=False)
    ggml_type: int | None = None
    form: Form = BLOCKS
    dtype: torch.dtype = torch.uint8
    row_bytes: int = 0
    encode: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    published: Published | None = field(default=None, repr=False)

    @property
    def layout(self) -> Layout | None:
        """How a GPU's kernels unpack blocks; None: torch dequantizes them there."""
        return self.dequantize if isinstance(self.dequantize, Layout) else None

    def divides(self, columns: int) -> bool:
        """Whether rows of so many elements are whole blocks."""
        return columns % self.block_size == 0

    def row_width(self, columns: int) -> int:
        """Bytes of the blocks of a row."""
        return columns // self.block_size * self.block_bytes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape."""
        if not shape:
            return self.block_bytes
        return math.prod(shape[:-1]) * (self.row_width(shape[-1]) + self.row_bytes)


class Stored:
    """A weight in another form than floats: a frozen dataclass, in whose fields are its tensors."""

    form: ClassVar[str]

    if TYPE_CHECKING:  # dataclasses would take these for the defaults of their fields

        @property
        def format(self) -> Format:
            """The format of the numbers, whatever their layout in memory."""

        @property
        def shape(self) -> tuple[int, ...]:
            """In elements."""

    @abstractmethod
    def __getitem__(self, index: int | slice, /) -> Stored:
        """Entry or range (step 1) of the first axis, without a copy. Raises IndexError for an entry
        out of range, ValueError for a step and for an axis whose entries do not lie apart."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All elements as a new tensor: computed in float32, then rounded to `dtype`."""

    def index_select(self, dim: int, ids: Tensor, /) -> Stored:
        """Copies the entries `ids` (int64 [n]) of the first axis, which `dim` is. Raises ValueError
        where they do not lie apart."""
        raise ValueError(f"{self!r}: single rows do not lie apart: dequantize first")

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> Stored:
        """Copies columns first..end, of whole blocks, of the rows `ids` (int64 [n]) of a matrix.
        Raises ValueError where rows do not lie apart."""
        raise ValueError(f"{self!r}: single rows do not lie apart: dequantize first")

    def factor(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with instead of x [..., in], in x's dtype."""
        return x

    @property
    def device(self) -> torch.device:
        return tensors_of(self)[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in tensors_of(self))

    @overload
    def to(self, dtype: torch.dtype, /) -> Tensor: ...

    @overload
    def to(self, device: torch.device | str, /) -> Self: ...

    def to(self, to: torch.dtype | torch.device | str, /) -> Tensor | Self:
        """The weight as floats of a dtype, or on a device."""
        if isinstance(to, torch.dtype):
            return self.dequantize(to)
        return self.moved(lambda each: each.to(to))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The weight with each of its tensors moved."""
        values: Any = self
        own = {each.name: getattr(self, each.name) for each in fields(values)}
        changed = {name: move(each) for name, each in own.items() if isinstance(each, Tensor)}
        moved: Self = replace(values, **changed)
        return moved


Weight = Tensor | Stored
"""A matrix, or several of one size, stacked."""


def form_of(weight: object) -> str:
    """The form of a weight: that of its class, or FLOAT."""
    return weight.form if isinstance(weight, Stored) else FLOAT


def tensors_of(weight: Any) -> list[Tensor]:
    """The tensors of a weight, in the order of its fields."""
    own = (
        [weight]
        if isinstance(weight, Tensor)
        else [getattr(weight, f.name) for f in fields(weight)]
    )
    return [each for each in own if isinstance(each, Tensor)]


def ranges_of_rows(shape: tuple[int, ...], elements: int) -> Iterator[slice]:
    """All rows of a matrix, so many at a time as have this number of elements, or one."""
    rows, columns = shape
    step = max(1, elements // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def in_steps_of_1(index: int | slice, what: str = "rows") -> None:
    """Raises ValueError for a range with another step."""
    if isinstance(index, slice) and index.step not in (None, 1):
        raise ValueError(f"{what} are taken in steps of 1, not {index.step}; use index_select")


# Elements dequantized at a time: temporaries stay at a few times 4 MiB whatever the tensor's size,
# within a CPU's cache. Elsewhere so few would cost more in kernel launches than in work.
_CHUNK = 1 << 20
_CHUNK_ELSEWHERE = 64 * _CHUNK

# Elements quantized at a time by each thread: enough that torch's work outweighs its calls, few
# enough that a dozen temporaries of 1 MiB hardly leave the cache.
_ENCODED = 1 << 18
_ENCODED_ELSEWHERE = 1 << 24


@dataclass(frozen=True, repr=False)
class QuantizedTensor(Stored):
    """A tensor kept in blocks along its last axis.

    data: uint8 [*shape[:-1], row_bytes], contiguous; it may be a read-only view of a mapped file.
    shape: the shape in elements; its last entry is a multiple of the block size.
    """

    data: Tensor
    format: Format
    shape: tuple[int, ...]
    form = BLOCKS

    def __post_init__(self) -> None:
        width = self.format.row_width(self.shape[-1])
        fits = self.format.divides(self.shape[-1])
        assert fits, f"{self.shape} does not divide into {self.format.name} blocks"
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert tuple(self.data.shape) == (*self.shape[:-1], width)

    def __getitem__(self, index: int | slice, /) -> QuantizedTensor:
        if len(self.shape) < 2:
            raise ValueError("the only axis of this tensor is the quantized one: dequantize first")
        in_steps_of_1(index)
        data = self.data[index]
        return QuantizedTensor(data, self.format, (*data.shape[:-1], self.shape[-1]))

    def index_select(self, dim: int, ids: Tensor, /) -> QuantizedTensor:
        assert dim == 0 and len(self.shape) >= 2
        data = self.data.index_select(0, ids)
        return QuantizedTensor(data, self.format, (len(ids), *self.shape[1:]))

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> QuantizedTensor:
        width = self.format.row_width
        data = self.data[:, width(first) : width(end)].index_select(0, ids)
        return QuantizedTensor(data, self.format, (len(ids), end - first))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        blocks = self.data.view(-1, self.format.block_bytes)
        out = torch.empty(len(blocks), self.format.block_size, dtype=dtype, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK_ELSEWHERE
        step = chunk // self.format.block_size
        for start in range(0, len(blocks), step):
            out[start : start + step] = self.format.dequantize(blocks[start : start + step])
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format.name}, {self.shape}, {self.device})"


def quantize(values: Tensor, format: Format) -> QuantizedTensor:
    """All of `values`, float [..., n] with n a multiple of the block size, in blocks.

    Raises ValueError if a value is not finite or a scale exceeds float16.
    """
    assert format.divides(values.shape[-1]), f"{values.shape} in {format.name} blocks"
    width = format.row_width(values.shape[-1])
    data = torch.empty(*values.shape[:-1], width, dtype=torch.uint8, device=values.device)
    rows, at = data.view(-1, format.block_bytes), 0
    for chunk in encoded(values, format):
        rows[at : at + len(chunk)] = chunk
        at += len(chunk)
    return QuantizedTensor(data, format, tuple(values.shape))


def encoded(values: Tensor, format: Format) -> Iterator[Tensor]:
    """The bytes of values in a format in chunks, as they are computed: uint8 [n, block_bytes]
    each. Raises ValueError for values that the format cannot hold."""
    assert format.encode is not None, f"{format.name}: is not written"
    flat = values.reshape(-1, format.block_size)
    on_cpu = values.device.type == "cpu"
    step = _ENCODED * torch.get_num_threads() if on_cpu else _ENCODED_ELSEWHERE
    for part in flat.split(step // format.block_size):
        yield format.encode(part.float() if format.form == BLOCKS else part)
