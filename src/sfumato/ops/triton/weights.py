"""How a block of a weight becomes numbers: the one place that knows how weights are stored.

Every matrix product of this package reads its weight through `weight_block`: a block of floats as
it is, or one of planes (`planes`), whose FORMAT is the number of its layout; the products do not
change.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from sfumato.weights.formats.iq4_nl import IQ4_VALUES
from sfumato.weights.formats.nvfp4 import FP4_VALUES

BF16 = tl.constexpr(0)
"""Numbers as they are, in the weight's dtype. Any other FORMAT is the number of a layout of planes;
see `planes.Layout`."""
SUPER = tl.constexpr(256)  # as in `planes`
_E2M1 = tl.constexpr(sum(int(2 * size) << 4 * at for at, size in enumerate(FP4_VALUES)))
_BYTES = np.array(IQ4_VALUES, np.int8).view(np.int64)
_TABLE_LOW, _TABLE_HIGH = (tl.constexpr(int(word)) for word in _BYTES)


@triton.jit
def weight_block(
    weight: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, COLUMNS: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block [OUT, IN] of a weight [rows, COLUMNS], from `row` and `column` on, in the dtype that
    is multiplied; zeros beyond the weight.

    weight: what `as_weight` made of it. Numbers come as they are stored; planes are unpacked and
    rounded once to DTYPE.
    """
    if FORMAT == BF16:
        return weight.load([row, column])
    else:
        return plane_block(weight, row, column, rows, COLUMNS, OUT, IN, FORMAT).to(DTYPE)


@triton.jit
def as_weight(
    weight: tl.tensor, rows: tl.tensor, COLUMNS: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr, FORMAT: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What `weight_block` reads: a descriptor of blocks [OUT, IN], or the address of planes."""
    if FORMAT == BF16:
        return as_descriptor(weight, rows, COLUMNS, OUT, IN, DESCRIPTORS)
    else:
        return weight


@triton.jit
def plane_block(
    weight: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, COLUMNS: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of a weight in planes, from `row` on; see `plane_rows`. Zeros beyond the weight."""
    numbers = row + tl.arange(0, OUT)
    at, known = numbers.to(tl.int64), numbers < rows
    return plane_rows(weight, at, known, column, rows, COLUMNS, OUT, IN, FORMAT)


@triton.jit
def plane_rows(
    weight: tl.tensor, at: tl.tensor, known: tl.tensor, column: tl.tensor, rows: tl.tensor,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The rows `at` (int64 [OUT]) of a weight in planes, unpacked in registers: float32 [OUT, IN],
    the bits that `PlaneTensor.dequantize` gives; zeros where not `known` and past the last column.

    weight: the address of the planes of `rows` rows; column: a multiple of IN, which divides SUPER.
    """
    tl.static_assert(SUPER % IN == 0 and IN % 32 == 0, "a block is part of a super-block")
    BITS: tl.constexpr = FORMAT % 16
    GROUP: tl.constexpr = 16 if FORMAT // 16 % 2 else 32
    TWO_LEVELS: tl.constexpr = FORMAT // 32 % 2
    MINIMA: tl.constexpr = FORMAT // 64 % 2
    TABLE: tl.constexpr = FORMAT // 128 % 2
    if FORMAT // 256 % 2:
        return _float_rows(weight, at, known, column, rows, COLUMNS, OUT, IN)
    many = tl.cast(rows, tl.int64)
    if BITS == 8:
        stored = _plane(weight, at, known, column, COLUMNS, IN, tl.uint8)
        value = stored.to(tl.int8, bitcast=True).to(tl.float32)
        scales = weight + many * COLUMNS
    else:
        LOW: tl.constexpr = 2 if BITS < 4 else 4
        SOME: tl.constexpr = 8 // LOW
        low = _plane(weight, at, known, column // SOME, COLUMNS // SOME, IN // SOME, tl.uint8)
        code = _parted(low, LOW, OUT, IN)
        scales = weight + many * (COLUMNS // SOME)
        if BITS > LOW:
            HIGH: tl.constexpr = BITS - LOW
            EACH: tl.constexpr = 8 // HIGH
            high = _plane(scales, at, known, column // EACH, COLUMNS // EACH, IN // EACH, tl.uint8)
            code |= _parted(high, HIGH, OUT, IN) << LOW
            scales += many * (COLUMNS // EACH)
        if TABLE:
            value = _from_table(code)
        elif MINIMA:
            value = code.to(tl.float32)
        else:
            value = (code - (1 << (BITS - 1))).to(tl.float32)
    GROUPS: tl.constexpr = COLUMNS // GROUP
    group = column // GROUP
    if TWO_LEVELS:
        scale, least, bases = _factors(scales, at, known, many, group, GROUPS, IN // GROUP, FORMAT)
        base = _plane(bases, at, known, column // SUPER, COLUMNS // SUPER, 1, tl.float16)
        value = spread(base.to(tl.float32) * scale, OUT, IN) * value
        if MINIMA:
            bases += many * (COLUMNS // SUPER * 2)
            base = _plane(bases, at, known, column // SUPER, COLUMNS // SUPER, 1, tl.float16)
            value = value - spread(base.to(tl.float32) * least, OUT, IN)
    else:
        scale = _scales(scales, at, known, group, GROUPS, IN // GROUP, FORMAT // 512)
        value = spread(scale, OUT, IN) * value
        if MINIMA:
            minima = scales + many * (GROUPS * 2)
            least = _plane(minima, at, known, group, GROUPS, IN // GROUP, tl.float16)
            value = value + spread(least.to(tl.float32), OUT, IN)
    return value


@triton.jit
def _float_rows(
    weight: tl.tensor, at: tl.tensor, known: tl.tensor, column: tl.tensor, rows: tl.tensor,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `plane_rows`, of codes of e2m1 with a scale of e4m3 for 16 of them and one of the row."""
    many = tl.cast(rows, tl.int64)
    low = _plane(weight, at, known, column // 2, COLUMNS // 2, IN // 2, tl.uint8)
    value = _e2m1_value(_parted(low, 4, OUT, IN))
    GROUPS: tl.constexpr = COLUMNS // 16
    scales = weight + many * (COLUMNS // 2)
    scale = e4m3_value(_plane(scales, at, known, column // 16, GROUPS, IN // 16, tl.uint8))
    own = _plane(scales + many * GROUPS, at, known, column * 0, 1, 1, tl.float32)
    return spread(scale * own, OUT, IN) * value


@triton.jit
def _scales(
    scales: tl.tensor, at: tl.tensor, known: tl.tensor, group: tl.tensor, GROUPS: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where there is one level: the scales of COUNT groups, float32 [rows, COUNT]. Those of
    bfloat16 (WIDE) are upper halves of float32, for which no GPU needs to know the type."""
    if WIDE:
        upper = _plane(scales, at, known, group, GROUPS, COUNT, tl.uint16)
        return (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return _plane(scales, at, known, group, GROUPS, COUNT, tl.float16).to(tl.float32)


@triton.jit
def _factors(
    scales: tl.tensor, at: tl.tensor, known: tl.tensor, many: tl.tensor, group: tl.tensor,
    GROUPS: tl.constexpr, COUNT: tl.constexpr, FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Where there are two levels: the factors of COUNT groups' scales and of their minima (without
    such, the scales'), float32 [rows, COUNT], and where the bases begin."""
    BITS: tl.constexpr = FORMAT % 16
    MINIMA: tl.constexpr = FORMAT // 64 % 2
    if BITS == 2:
        both = _plane(scales, at, known, group, GROUPS, COUNT, tl.uint8)
        scale = (both & 15).to(tl.float32)
        least = (both >> 4).to(tl.float32)
        bases = scales + many * GROUPS
    elif BITS == 3:
        nibble = _small(scales, at, known, group, GROUPS, COUNT, 4)
        tops = scales + many * (GROUPS // 2)
        top = _small(tops, at, known, group, GROUPS, COUNT, 2)
        scale = ((nibble | (top << 4)) - 32).to(tl.float32)
        least = scale
        bases = tops + many * (GROUPS // 4)
    else:
        byte = _plane(scales, at, known, group, GROUPS, COUNT, tl.uint8)
        scale = byte.to(tl.int8, bitcast=True).to(tl.float32)
        least = scale
        if MINIMA:
            minima = scales + many * GROUPS
            least = _plane(minima, at, known, group, GROUPS, COUNT, tl.uint8).to(tl.float32)
        bases = scales + many * (GROUPS * (1 + MINIMA))
    return scale, least, bases


@triton.jit
def _plane(
    plane: tl.tensor, at: tl.tensor, known: tl.tensor, first: tl.tensor, WIDTH: tl.constexpr,
    COUNT: tl.constexpr, KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """COUNT numbers from `first` on of the rows `at` of a plane, KIND [rows, WIDTH]; zeros where
    rows are not `known` and past the last one."""
    place = first + tl.arange(0, COUNT)
    source = plane.to(tl.pointer_type(KIND)) + at[:, None] * WIDTH + place[None, :]
    return tl.load(source, mask=known[:, None] & (place < WIDTH)[None, :], other=0)


@triton.jit
def _small(
    plane: tl.tensor, at: tl.tensor, known: tl.tensor, first: tl.tensor, WIDTH: tl.constexpr,
    COUNT: tl.constexpr, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `_plane`, of rows of WIDTH numbers of BITS bits, the lowest bits first: int32. They need
    not begin with a byte."""
    place = first + tl.arange(0, COUNT)
    EACH: tl.constexpr = 8 // BITS
    source = plane.to(tl.pointer_type(tl.uint8)) + at[:, None] * (WIDTH // EACH)
    inside = known[:, None] & (place < WIDTH)[None, :]
    byte = tl.load(source + (place // EACH)[None, :], mask=inside, other=0)
    return (byte.to(tl.int32) >> (place % EACH * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _parted(plane: tl.tensor, BITS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr) -> tl.tensor:
    """The numbers of BITS bits in bytes, the lowest bits first: int32 [OUT, IN]."""
    shifts = tl.arange(0, 8 // BITS) * BITS
    parts = (plane.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(parts, (OUT, IN))


@triton.jit
def spread(groups: tl.tensor, OUT: tl.constexpr, IN: tl.constexpr) -> tl.tensor:
    """Each group's number for all its elements: [OUT, n] → [OUT, IN]."""
    GROUPS: tl.constexpr = groups.shape[1]
    parts = tl.broadcast_to(groups[:, :, None], (OUT, GROUPS, IN // GROUPS))
    return tl.reshape(parts, (OUT, IN))


@triton.jit
def _from_table(code: tl.tensor) -> tl.tensor:
    """IQ4_VALUES at a code, float32: from two words of eight bytes, since registers have no
    addresses."""
    word = tl.where(code < 8, _TABLE_LOW, _TABLE_HIGH).to(tl.int64)
    return (word >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)


@triton.jit
def _e2m1_value(code: tl.tensor) -> tl.tensor:
    """The number of a code of e2m1, float32: its size, doubled, is one of eight digits."""
    digit = (_E2M1 >> ((code & 7) * 4).to(tl.int64)) & 15
    size = digit.to(tl.float32) * 0.5
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def e4m3_value(byte: tl.tensor) -> tl.tensor:
    """Bytes of e4m3 as float32. As float16 with the same fields they are 2⁻⁸ of what they are, the
    smallest too; the one that would be 480 is NaN."""
    wide = byte.to(tl.uint32)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def as_descriptor(
    matrix: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> tl.tensor:
    """A matrix [rows, COLUMNS] as a descriptor of blocks: as it is where DESCRIPTORS is set, else
    made of its address.

    On sm_90 the copy engine fills shared memory from a descriptor, with no registers and one
    instruction a block.  GPUs without a copy engine load by addresses either way. From an address
    of known alignment and a constant row they load 16 bytes a thread, past registers; from a
    descriptor that the host made, 2 bytes, since a compiler knows nothing of its strides.
    """
    if DESCRIPTORS:
        return matrix
    else:
        return tl.make_tensor_descriptor(
            matrix, [rows, COLUMNS], [COLUMNS, 1], [BLOCK_ROWS, BLOCK_COLUMNS]
        )


@triton.jit
def product(a: tl.tensor, b: tl.tensor, accumulator: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """accumulator + a @ b in float32: of bfloat16, or of float32 where UPCAST is set."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
