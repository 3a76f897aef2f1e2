"""How a block of a weight becomes numbers, and what it is multiplied with: the one place that knows
how weights are stored.

Every matrix product of this package reads its weight through `weight_block`, by a constant FORMAT:
a block of floats as it is, one of planes (`planes`), whose FORMAT is the number of its layout, or
8-bit codes with a scale for each row, which is applied once, after the last product, in three ways:

- FP8_CODES and INT8_CODES multiply codes by codes: those of activations are made on the device, a
  row at a time (`round_rows`).
- FP8_BYTES multiplies e4m3 codes, unpacked by integers, by the activations as they are, for GPUs
  whose matrix units take no e4m3 and whose compiler knows no such type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import matrix
from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, multiplies_codes
from sfumato.ops.triton.tiles import tile_for
from sfumato.weights.formats import CODES, LEAST, MOST, Kind, ScaledTensor
from sfumato.weights.formats.iq4_nl import IQ4_VALUES
from sfumato.weights.formats.nvfp4 import FP4_VALUES

BF16 = tl.constexpr(0)
"""Numbers as they are, in the weight's dtype. A FORMAT above it is the number of a layout of
planes; see `formats.Layout`."""
FP8_CODES, INT8_CODES, FP8_BYTES = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)
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

    weight: what `as_weight` made of it. Numbers and codes come as they are stored; planes, and
    codes in bytes, are unpacked and rounded once to DTYPE.
    """
    if FORMAT == FP8_BYTES:
        return e4m3_value(weight.load([row, column])).to(DTYPE)
    elif FORMAT <= BF16:
        return weight.load([row, column])
    else:
        at = row + tl.arange(0, OUT)
        known = at < rows
        value = plane_rows(weight, at.to(tl.int64), known, column, rows, COLUMNS, OUT, IN, FORMAT)
        return value.to(DTYPE)


@triton.jit
def as_weight(
    weight: tl.tensor, rows: tl.tensor, COLUMNS: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr, FORMAT: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What `weight_block` reads: a descriptor of blocks [OUT, IN], or the address of planes."""
    if FORMAT <= BF16:
        return as_descriptor(weight, rows, COLUMNS, OUT, IN, DESCRIPTORS)
    else:
        return weight


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
    LOW: tl.constexpr = BITS if BITS == 8 else 2 if BITS < 4 else 4
    code = _codes(weight, at, known, column, COLUMNS, IN, LOW)
    scales = weight + many * (COLUMNS * LOW // 8)
    if BITS > LOW:
        HIGH: tl.constexpr = BITS - LOW
        code |= _codes(scales, at, known, column, COLUMNS, IN, HIGH) << LOW
        scales += many * (COLUMNS * HIGH // 8)
    HALF: tl.constexpr = 1 << (BITS - 1)
    if TABLE:
        value = _from_table(code)
    elif MINIMA:
        value = code.to(tl.float32)
    elif BITS == 8:  # with a sign
        value = ((code ^ HALF) - HALF).to(tl.float32)
    else:
        value = (code - HALF).to(tl.float32)
    GROUPS: tl.constexpr = COLUMNS // GROUP
    group = column // GROUP
    if TWO_LEVELS:
        value = _two_levels(
            value, scales, at, known, column, many, COLUMNS, OUT, IN, GROUP, BITS, MINIMA
        )
    else:
        scale = _scales(scales, at, known, group, GROUPS, IN // GROUP, FORMAT // 512)
        value = spread(scale, known, IN) * value
        if MINIMA:
            minima = scales + many * (GROUPS * 2)
            least = _plane(minima, at, known, group, GROUPS, IN // GROUP, tl.float16)
            value = value + spread(least.to(tl.float32), known, IN)
    return value


@triton.jit
def _two_levels(
    value: tl.tensor, scales: tl.tensor, at: tl.tensor, known: tl.tensor, column: tl.tensor,
    many: tl.tensor, COLUMNS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, MINIMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The codes of `plane_rows` times scales, less minima, of which each is a base for SUPER
    columns times a factor of a group; scales: the address of the planes of factors, then of
    bases."""
    GROUPS: tl.constexpr = COLUMNS // GROUP
    group = column // GROUP
    scale = _plane(scales, at, known, group, GROUPS, IN // GROUP, tl.uint8)
    bases = scales + many * GROUPS
    if BITS == 2:  # both factors share a byte
        least = scale >> 4
        scale = scale & 15
    else:
        scale = scale.to(tl.int8, bitcast=True)
        if MINIMA:
            least = _plane(bases, at, known, group, GROUPS, IN // GROUP, tl.uint8)
            bases += many * GROUPS
    base = _plane(bases, at, known, column // SUPER, COLUMNS // SUPER, 1, tl.float16)
    value = spread(base.to(tl.float32) * scale.to(tl.float32), known, IN) * value
    if MINIMA:
        bases += many * (COLUMNS // SUPER * 2)
        base = _plane(bases, at, known, column // SUPER, COLUMNS // SUPER, 1, tl.float16)
        value = value - spread(base.to(tl.float32) * least.to(tl.float32), known, IN)
    return value


@triton.jit
def _float_rows(
    weight: tl.tensor, at: tl.tensor, known: tl.tensor, column: tl.tensor, rows: tl.tensor,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Unpacks as `plane_rows` does, codes of e2m1 with a scale of e4m3 for 16 of them and one of
    the row."""
    many = tl.cast(rows, tl.int64)
    value = _e2m1_value(_codes(weight, at, known, column, COLUMNS, IN, 4))
    GROUPS: tl.constexpr = COLUMNS // 16
    scales = weight + many * (COLUMNS // 2)
    scale = e4m3_value(_plane(scales, at, known, column // 16, GROUPS, IN // 16, tl.uint8))
    own = _plane(scales + many * GROUPS, at, known, column * 0, 1, 1, tl.float32)
    return spread(scale * own, known, IN) * value


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
def _parted(plane: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The numbers of BITS bits in bytes int32 [rows, n], the lowest bits first: int32 [rows, n · 8
    / BITS], of which all bits but the lowest BITS are to be cleared.

    Halves are interleaved, and no tensor of shifts is broadcast: so a thread keeps the bytes that
    it loaded, which are of few rows, and makes few scales.
    """
    if BITS == 8:
        return plane
    else:
        return tl.interleave(_parted(plane, 2 * BITS), _parted(plane >> BITS, 2 * BITS))


@triton.jit
def _codes(
    plane: tl.tensor, at: tl.tensor, known: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr,
    IN: tl.constexpr, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """IN numbers of BITS bits from `column` on, of the rows `at` of a plane: int32 [rows, IN]."""
    EACH: tl.constexpr = 8 // BITS
    stored = _plane(plane, at, known, column // EACH, COLUMNS // EACH, IN // EACH, tl.uint8)
    return _parted(stored.to(tl.int32), BITS) & ((1 << BITS) - 1)


@triton.jit
def spread(groups: tl.tensor, known: tl.tensor, IN: tl.constexpr) -> tl.tensor:
    """Each group's number for all its elements: [rows, n] → [rows, IN]; zeros where not `known`.

    Triton moves the conversion to what matrix units read before what can be loaded by any thread,
    and then all warps unpack the same.  What depends on places, as `known` does, stays where it is.
    """
    if groups.shape[1] == IN:
        return tl.where(known[:, None], groups, 0.0)
    else:
        return spread(tl.interleave(groups, groups), known, IN)


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
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """e4m3 codes in bytes as float32, exact, but for NaN: the bits of a float16 with four of its
    five bits of exponent, whose bias is 15 and not 7. Small numbers are subnormal in both."""
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


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


@triton.jit
def no_sums(OUT: tl.constexpr, TOKENS: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Zeros [OUT, TOKENS] to add products with a weight to: int32 or float32."""
    if FORMAT == INT8_CODES:
        return tl.zeros((OUT, TOKENS), tl.int32)
    else:
        return tl.zeros((OUT, TOKENS), tl.float32)


@triton.jit
def weight_product(
    weight: tl.tensor, x: tl.tensor, sums: tl.tensor, IN: tl.constexpr, FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums + weight @ x of a block of a weight [OUT, IN] by activations, or their codes, [IN,
    TOKENS].

    The matrix units of sm_90 keep about 14 bits of a sum of e4m3 products; they drop the others of
    each 32 products that they add. So the sums of a block of IN inputs, 128 at most, are added to
    float32 registers: at most four such steps come before that, which lose less than a thousandth
    of a block's sum, where the rounding of the activations is 1/28 of each product. Sums of all
    inputs would lose up to 88 steps.
    """
    if FORMAT == INT8_CODES:
        return tl.dot(weight, x, sums, input_precision="ieee", out_dtype=tl.int32)
    elif FORMAT == FP8_CODES and not UPCAST:
        tl.static_assert(IN <= 128, "a block's sum is made in four steps at most")
        return tl.dot(weight, x, sums, input_precision="ieee", max_num_imprecise_acc=IN)
    else:
        return product(weight, x, sums, UPCAST)


@triton.jit
def scaled(
    sums: tl.tensor, scales: tl.tensor, first: tl.tensor, rows: tl.tensor, limit: tl.tensor,
    x_scales: tl.tensor, places: tl.tensor, mine: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Sums [OUT, TOKENS] as float32, times the scales of the weight's `rows` from `first` on, below
    `limit`, and of the activations at `places`, where they have such."""
    value = sums.to(tl.float32)
    if scales is not None:
        own = tl.load(scales + first + rows, mask=rows < limit, other=0.0)
        value = value * own[:, None]
    if x_scales is not None:
        value = value * tl.load(x_scales + places, mask=mine, other=0.0)[None, :]
    return value


@triton.jit
def gathered(source: tl.tensor, inside: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """What stands at addresses, and zeros where they are not `inside`: Triton has no zero of e4m3
    to load instead, but its byte."""
    if FORMAT == FP8_CODES:
        stored = tl.load(source.to(tl.pointer_type(tl.uint8), bitcast=True), mask=inside, other=0)
        return stored.to(tl.float8e4nv, bitcast=True)
    else:
        return tl.load(source, mask=inside, other=0.0)


@dataclass(frozen=True)
class Form:
    """How a kernel takes weights of 8-bit codes: by which FORMAT, and the types of what it
    multiplies, as Triton names them; format: that of the weights."""

    number: int
    x: str
    weight: str
    format: Kind


FORMS = {
    "fp8": Form(FP8_CODES.value, "fp8e4nv", "fp8e4nv", "FP8"),
    "int8": Form(INT8_CODES.value, "i8", "i8", "INT8"),
    "bytes": Form(FP8_BYTES.value, "bf16", "u8", "FP8"),
}


def of_forms(
    kernel: Kernel, columns: str, planes: str, x: str = "", scales: Sequence[str] = ()
) -> Mapping[str, Kernel]:
    """A kernel of weights of floats, registered, and by the form its like for other weights.

    columns: which constant is the number of a weight's columns; planes: the format whose planes are
    compiled where none is named; x: the parameter that is multiplied, of kernels that take codes;
    scales: those of codes, the first of what is multiplied, the others of weights.
    """
    held = kernel.types.keys() & {"weight", "second", "third"}

    def like(form: str, types: Mapping[str, str], number: int, **more: Any) -> Kernel:
        """types: those that differ, also of what was None."""
        sizes = {name: size for name, size in kernel.sizes.items() if name not in types}
        more |= {"types": {**kernel.types, **types}, "sizes": sizes | {"FORMAT": number}}
        return register(replace(kernel, name=f"{kernel.name}_{form}", **more))

    kernels, packed = {"": register(kernel)}, dict.fromkeys(held, "*u8:16")
    kernels["planes"] = like("planes", packed, LAYOUTS[planes].number, columns=columns)
    for name, form in FORMS.items() if x else ():
        codes = dict.fromkeys(held, form.weight) | {x: form.x}
        types = {each: kernel.types[each].replace("bf16", kind) for each, kind in codes.items()}
        types |= dict.fromkeys(scales if form.x != "bf16" else scales[1:], "*fp32:16")
        kernels[name] = like(name, types, form.number, format=form.format)
    return kernels


@dataclass(frozen=True)
class Operand:
    """A weight as kernels take it: of which form, by which FORMAT, its numbers and its scales."""

    form: str
    number: int
    numbers: Tensor
    scales: Tensor | None = None

    def stored(self, rows: int, columns: int) -> dict[str, Any]:
        """The parameters of a kernel that say what the weight is; rows and columns: of a block."""
        is_matrix = self.form != "planes"
        weight = matrix(self.numbers, rows, columns) if is_matrix else self.numbers
        return {"weight": weight, "FORMAT": self.number}

    def multiplied(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the weight is multiplied with instead of x [rows, columns], contiguous, and its
        scales: codes, or x itself."""
        if self.form not in ROUND_ROWS:
            return x, None
        held = round_rows(x, "FP8" if self.form == "fp8" else "INT8")
        return held.codes, held.scales


def operand(weight: Tensor | PlaneTensor | ScaledTensor) -> Operand:
    """A weight as the kernels of its device take it."""
    if isinstance(weight, Tensor):
        return Operand("", 0, weight)
    if isinstance(weight, PlaneTensor):
        return Operand("planes", weight.layout.number, weight.data)
    if not multiplies_codes(weight.kind, weight.device):
        codes = weight.codes.view(torch.uint8)
        return Operand("bytes", FP8_BYTES.value, codes, weight.scales)
    form = weight.kind.lower()
    return Operand(form, FORMS[form].number, weight.codes, weight.scales)


_FP8_MOST = tl.constexpr(MOST["FP8"])
_INT8_MOST = tl.constexpr(MOST["INT8"])
_LEAST = tl.constexpr(LEAST)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to and taken from a float32 number below 2²², it leaves the nearest integer, ties to even:
the compiler contracts and reorders nothing; see `kernel.FP_FUSION`."""
_FINE_ROUNDER = tl.constexpr(1.5 * 2**14)
"""Rounds as _ROUNDER does, to multiples of 2⁻⁹."""


@triton.jit
def _round_rows(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """codes [rows, COLUMNS] and scales float32 [rows] of x [rows, COLUMNS]: the bits of
    `scaled.round_rows`. A program makes a row, which it reads twice, the second time from a cache.

    Zero times a number that is not finite is NaN, which a maximum would not show.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    tops = tl.zeros((BLOCK,), tl.float32)
    spoiled = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        source = x + row * COLUMNS + first + columns
        part = tl.load(source, mask=first + columns < COLUMNS, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.abs(part))
        spoiled += part * 0.0
    top = tl.maximum(tl.max(tops, 0), _LEAST)
    MOST_CODE: tl.constexpr = _INT8_MOST if FORMAT == INT8_CODES else _FP8_MOST
    tl.store(scales + row, top * (1 / MOST_CODE) + tl.sum(spoiled, 0))
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), top) * MOST_CODE
    for first in range(0, COLUMNS, BLOCK):
        inside = first + columns < COLUMNS
        place = row * COLUMNS + first + columns
        part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor
        if FORMAT == INT8_CODES:
            part = (part + _ROUNDER) - _ROUNDER
            part = tl.minimum(tl.maximum(part, -MOST_CODE), MOST_CODE)
            tl.store(codes + place, part.to(tl.int8), mask=inside)
        else:
            part = tl.minimum(tl.maximum(part, -MOST_CODE), MOST_CODE)
            if UPCAST:  # the interpreter's own rounding loses carries
                part = _nearest_e4m3(part)
            code = part.to(tl.float8e4nv, fp_downcast_rounding="rtne")
            tl.store(codes + place, code, mask=inside)


@triton.jit
def _nearest_e4m3(number: tl.tensor) -> tl.tensor:
    """Numbers up to 448 as the nearest that e4m3 has, ties to even, float32. Below 2⁻⁶ these are
    multiples of 2⁻⁹; above, they have four bits."""
    bits = number.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    small = (number + _FINE_ROUNDER) - _FINE_ROUNDER
    return tl.where(tl.abs(number) < 0.015625, small, bits.to(tl.float32, bitcast=True))


ROUND_ROWS = {
    form: register(
        Kernel(
            f"round_rows_{form}",
            _round_rows,
            {"x": "*bf16:16", "codes": f"*{FORMS[form].x}:16", "scales": "*fp32:16"},
            {"COLUMNS": 2816, "FORMAT": FORMS[form].number},
            shapes={f"{n} columns": {"COLUMNS": n} for n in (704, 2112, 2816, 4096, 8192)},
            format=FORMS[form].format,
        )
    )
    for form in ("fp8", "int8")
}


def round_rows(x: Tensor, kind: Kind) -> ScaledTensor:
    """x [rows, columns], contiguous, as codes with a scale for each row."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=CODES[kind], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel = ROUND_ROWS[kind.lower()]
    tile = tile_for(kernel.name, x.device)
    launch(kernel, (rows,), tile, x.device, x=x, codes=codes, scales=scales, COLUMNS=columns,
           FORMAT=kernel.sizes["FORMAT"])  # fmt: skip
    return ScaledTensor(codes, scales)
