"""What a stored format is: its layout, how bytes become numbers and back, how kernels unpack it.

Each format is one value in a file of this folder; `FORMATS` in `__init__.py` has all of them.
Knows no files of a checkpoint and no layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

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
    e4m3 for each group, and one of float32 for the row, times which the groups' come.

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
    table: bool = False  # codes are places in IQ4_VALUES
    floats: bool = False
    wide: bool = False  # scales, of one level, are bfloat16

    @property
    def number(self) -> int:
        """The constant FORMAT of a kernel; see `weights.plane_rows`. None is 0."""
        flags = (self.group == 16, self.two_levels, self.minima, self.table, self.floats, self.wide)
        return self.bits + sum(16 << place for place, flag in enumerate(flags) if flag)

    @property
    def centre(self) -> int:
        """What is subtracted from a code."""
        is_signed = self.minima or self.table or self.floats or self.bits == 8
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


@dataclass(frozen=True)
class Published:
    """How published safetensors checkpoints have a narrow format.

    codes: the format of the codes in a file's header; count: how many an element of it holds;
    numbers: codes → a new float32 [rows, columns], before scales.  nearest: the block formats
    nearest to the values, the first of which that divides the rows is taken, each with what makes
    its blocks of codes and float32 scales [rows, groups]; None: the values are quantized.
    unchanged: codes, scales float32 [1 or rows, groups], or those of groups and the matrix's own →
    blocks of the format itself.
    """

    codes: str
    count: int
    numbers: Callable[[Tensor], Tensor]
    nearest: tuple[tuple[Format, Callable[[Tensor, Tensor], Tensor] | None], ...]
    unchanged: Callable[[Tensor, Tensor, float], Tensor] | None = None


@dataclass(frozen=True)
class Format:
    """One stored format: `block_bytes` bytes hold `block_size` consecutive elements of a row, and
    `row_bytes` more belong to a row.

    dequantize: uint8 [n, block_bytes] → float32 [n, block_size].  encode: the way back, where it is
    written; raises ValueError for values that the format cannot hold.  dtype: torch's own for
    floats and codes.  ggml_type: the number in GGUF files, by which a CPU's library knows it too
    (`csrc/blocks.h`); None: no file has such blocks.  layout: how a GPU's kernels unpack it; None:
    torch dequantizes it there.  published: how narrow checkpoints have it.
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
    layout: Layout | None = field(default=None, repr=False)
    published: Published | None = field(default=None, repr=False)

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
