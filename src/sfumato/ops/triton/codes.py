"""Codes in kernels: how rows of activations become codes, and how codes are multiplied.

Weights come as `ScaledTensor`: codes and a scale for each row.  A kernel with a constant WAY serves
four ways of one product, all with float32 or int32 sums and with the rows' scales applied once,
after the last of them:

- FP8_CODES and INT8_CODES multiply codes by codes: those of activations are made on the device, a
  row at a time (`round_rows`).
- FP4_CODES does so with codes of e2m1, two in a byte, whose groups' scales the matrix units apply
  themselves: those of NVIDIA's Blackwell alone.
- FP8_BYTES multiplies e4m3 codes, unpacked by integers, by the activations as they are, for GPUs
  whose matrix units take no e4m3 and whose compiler knows no such type.

Inputs of a product are counted in bytes of codes, of which FP4 has two to a byte.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import e2m1_value, e4m3_value, parted, product, spread
from sfumato.weights.fp4 import GROUP
from sfumato.weights.scaled import CODES, LEAST, MOST, Kind, ScaledTensor, code_bytes

FP8_CODES = tl.constexpr(0)
INT8_CODES = tl.constexpr(1)
FP8_BYTES = tl.constexpr(2)
FP4_CODES = tl.constexpr(3)

_FP8_MOST = tl.constexpr(MOST["FP8"])
_INT8_MOST = tl.constexpr(MOST["INT8"])
_FP4_MOST = tl.constexpr(MOST["FP4"])
_GROUP = tl.constexpr(GROUP)
_GROUP_BYTES = tl.constexpr(GROUP // 2)  # of codes
_LEAST = tl.constexpr(LEAST)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to and taken from a float32 number below 2²², it leaves the nearest integer, ties to even:
the compiler contracts and reorders nothing; see `kernel.FP_FUSION`."""
_FINE_ROUNDER = tl.constexpr(1.5 * 2**14)
"""As _ROUNDER, to multiples of 2⁻⁹."""


@triton.jit
def _round_rows(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    COLUMNS: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """codes [rows, COLUMNS] and scales float32 [rows] of x [rows, COLUMNS]: the bits of
    `scaled.round_rows`. A program makes a row, which it reads twice, the second time from a
    cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    MOST_CODE: tl.constexpr = _INT8_MOST if WAY == INT8_CODES else _FP8_MOST
    top, scale = _top_and_scale(x, row, COLUMNS, MOST_CODE, BLOCK)
    tl.store(scales + row, scale)
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), top) * MOST_CODE
    for first in range(0, COLUMNS, BLOCK):
        inside = first + columns < COLUMNS
        place = row * COLUMNS + first + columns
        part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor
        if WAY == INT8_CODES:
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
def _top_and_scale(
    x: tl.tensor, row: tl.tensor, COLUMNS: tl.constexpr, MOST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The largest number of a row of x [rows, COLUMNS], and the scale by which it has the largest
    code. Zero times a number that is not finite is NaN, which a maximum would not show."""
    columns = tl.arange(0, BLOCK)
    tops = tl.zeros((BLOCK,), tl.float32)
    spoiled = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        source = x + row * COLUMNS + first + columns
        part = tl.load(source, mask=first + columns < COLUMNS, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.abs(part))
        spoiled += part * 0.0
    top = tl.maximum(tl.max(tops, 0), _LEAST)
    return top, top * (1 / MOST_CODE) + tl.sum(spoiled, 0)


@triton.jit
def _round_rows_fp4(
    x: tl.tensor,
    codes: tl.tensor,
    groups: tl.tensor,
    scales: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """As `_round_rows`, to codes of e2m1 [rows, COLUMNS / 2] with scales of groups in e4m3
    [rows, COLUMNS / 16]: the bits of `fp4.to_codes` of the numbers in units of the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top, scale = _top_and_scale(x, row, COLUMNS, _FP4_MOST, BLOCK)
    tl.store(scales + row, scale)
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), top) * _FP4_MOST
    GROUPS: tl.constexpr = BLOCK // _GROUP
    for first in range(0, COLUMNS, BLOCK):
        inside = first + columns < COLUMNS
        part = tl.load(x + row * COLUMNS + first + columns, mask=inside, other=0.0)
        part = tl.reshape(part.to(tl.float32) * factor, (GROUPS, _GROUP))
        part = tl.minimum(tl.maximum(part, -_FP4_MOST), _FP4_MOST)
        largest = tl.max(tl.abs(part), 1)
        of_group = tl.minimum(tl.div_rn(largest, tl.full((GROUPS,), 6.0, tl.float32)), 448.0)
        if UPCAST:
            of_group = _nearest_e4m3(of_group)
        code = of_group.to(tl.float8e4nv, fp_downcast_rounding="rtne")
        place = first // _GROUP + tl.arange(0, GROUPS)
        tl.store(groups + row * (COLUMNS // _GROUP) + place, code, mask=place < COLUMNS // _GROUP)
        rounded = code.to(tl.float32)
        divisor = tl.where(rounded > 0, rounded, float("inf"))  # without a scale there are no codes
        quotient = tl.div_rn(part, tl.broadcast_to(divisor[:, None], (GROUPS, _GROUP)))
        nibbles = tl.reshape(_nearest_e2m1(quotient), (BLOCK // 2, 2))
        both = tl.sum(nibbles << (tl.arange(0, 2) * 4)[None, :], 1)
        place = first // 2 + tl.arange(0, BLOCK // 2)
        target = codes + row * (COLUMNS // 2) + place
        tl.store(target, both.to(tl.uint8), mask=place < COLUMNS // 2)


@triton.jit
def _nearest_e2m1(number: tl.tensor) -> tl.tensor:
    """The codes of the nearest numbers of e2m1, ties to even codes: int32. A number that is none
    becomes zero."""
    size = tl.abs(number)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32) + (number < 0).to(tl.int32) * 8


@triton.jit
def _nearest_e4m3(number: tl.tensor) -> tl.tensor:
    """Numbers up to 448 as the nearest that e4m3 has, ties to even, float32. Below 2⁻⁶ these are
    multiples of 2⁻⁹; above, they have four bits."""
    bits = number.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    small = (number + _FINE_ROUNDER) - _FINE_ROUNDER
    return tl.where(tl.abs(number) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def no_sums(OUT: tl.constexpr, TOKENS: tl.constexpr, WAY: tl.constexpr) -> tl.tensor:
    """Zeros [OUT, TOKENS] to add products to: int32 or float32."""
    if WAY == INT8_CODES:
        return tl.zeros((OUT, TOKENS), tl.int32)
    else:
        return tl.zeros((OUT, TOKENS), tl.float32)


@triton.jit
def product_of_codes(
    weight: tl.tensor, x: tl.tensor, sums: tl.tensor, IN: tl.constexpr, WAY: tl.constexpr,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums + weight @ x: codes [OUT, IN], or bytes of them, by codes [IN, TOKENS], or by floats.

    The matrix units of sm_90 keep about 14 bits of a sum of e4m3 products; they drop the others of
    each 32 products that they add. So the sums of a block of IN inputs, 128 at most, are added to
    float32 registers: at most four such steps come before that, which lose less than a thousandth
    of a block's sum, where the rounding of the activations is 1/28 of each product. Sums of all
    inputs would lose up to 88 steps. DTYPE: of the activations; UPCAST: as in `kernel`.
    """
    tl.static_assert(IN <= 128, "a block's sum is made in four steps at most")
    if WAY == FP8_BYTES:
        return product(_floats(weight).to(DTYPE), x, sums, UPCAST)
    elif WAY == INT8_CODES:
        return tl.dot(weight, x, sums, input_precision="ieee", out_dtype=tl.int32)
    elif UPCAST:
        return product(weight, x, sums, UPCAST)
    else:
        return tl.dot(weight, x, sums, input_precision="ieee", max_num_imprecise_acc=IN)


@triton.jit
def group_scales(
    groups: tl.tensor, rows: tl.tensor, known: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr,
    IN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The bytes of the scales of groups, uint8 [rows, IN / 8], of IN bytes of codes from `column`
    on of rows (int64) of COLUMNS such bytes; zeros where not `known` and past the last column."""
    place = column // _GROUP_BYTES + tl.arange(0, IN // _GROUP_BYTES)
    COUNT: tl.constexpr = COLUMNS // _GROUP_BYTES
    source = groups.to(tl.pointer_type(tl.uint8), bitcast=True) + rows[:, None] * COUNT
    return tl.load(source + place[None, :], mask=known[:, None] & (place < COUNT)[None, :], other=0)


@triton.jit
def product_of_fp4(
    weight: tl.tensor, groups: tl.tensor, x: tl.tensor, x_groups: tl.tensor, sums: tl.tensor,
    OUT: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr, UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums + weight @ x.T: bytes of codes [OUT, IN] and [TOKENS, IN], with the bytes of the scales
    of their groups [OUT, IN / 8] and [TOKENS, IN / 8].

    The interpreter of Triton 3.6 takes such scales for powers of two, and says nothing: interpreted
    codes are unpacked (UPCAST), so that no more than the units' own product stays untested there.
    """
    if UPCAST:
        wide = _fp4_floats(weight, groups, OUT, IN * 2)
        return product(wide, _fp4_floats(x, x_groups, TOKENS, IN * 2).T, sums, UPCAST)
    else:
        scales = groups.to(tl.float8e4nv, bitcast=True)
        x_scales = x_groups.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(weight, scales, "e2m1", x.T, x_scales, "e2m1", sums)


@triton.jit
def _fp4_floats(
    codes: tl.tensor, groups: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Codes of e2m1, two in a byte, times the scales of their groups: float32 [ROWS, COLUMNS]."""
    return e2m1_value(parted(codes, 4, ROWS, COLUMNS)) * spread(e4m3_value(groups), ROWS, COLUMNS)


@triton.jit
def _floats(code: tl.tensor) -> tl.tensor:
    """e4m3 codes in bytes as float32, exact: the bits of a float16 with four of its five bits of
    exponent, whose bias is 15 and not 7. Small numbers are subnormal in both."""
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def scales_of(scales: tl.tensor, first: tl.tensor, rows: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The scales of `rows` of those from `first` on, float32; zeros from `limit` on."""
    return tl.load(scales + first + rows, mask=rows < limit, other=0.0)


@triton.jit
def gathered(source: tl.tensor, inside: tl.tensor, WAY: tl.constexpr) -> tl.tensor:
    """What stands at addresses, and zeros where they are not `inside`: Triton has no zero of e4m3
    to load instead, but its byte."""
    if WAY == FP8_CODES:
        stored = tl.load(source.to(tl.pointer_type(tl.uint8), bitcast=True), mask=inside, other=0)
        return stored.to(tl.float8e4nv, bitcast=True)
    else:
        return tl.load(source, mask=inside, other=0)


def _kernel(name: str, type_of_codes: str, way: tl.constexpr, format: Kind) -> Kernel:
    types = {"x": "*bf16:16", "codes": f"*{type_of_codes}:16", "scales": "*fp32:16"}
    shapes = {
        f"{columns} columns": {"COLUMNS": columns} for columns in (704, 2112, 2816, 4096, 8192)
    }
    sizes = {"COLUMNS": 2816, "WAY": way.value}
    return register(Kernel(name, _round_rows, types, sizes, shapes=shapes, format=format))


ROUND_ROWS = {
    "FP8": _kernel("round_rows_fp8", "fp8e4nv", FP8_CODES, "FP8"),
    "INT8": _kernel("round_rows_int8", "i8", INT8_CODES, "INT8"),
}
_ANY = ROUND_ROWS["FP8"]
ROUND_ROWS_FP4 = register(
    Kernel(
        "round_rows_fp4",
        _round_rows_fp4,
        {**_ANY.types, "codes": "*u8:16", "groups": "*fp8e4nv:16"},
        {"COLUMNS": 2816},
        shapes=_ANY.shapes,
        format="FP4",
    )
)


def round_rows(x: Tensor, kind: Kind) -> ScaledTensor:
    """x [rows, columns], contiguous, as codes with a scale for each row."""
    rows, columns = x.shape
    codes = torch.empty(rows, code_bytes(kind, columns), dtype=CODES[kind], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    given = {"x": x, "codes": codes, "scales": scales, "COLUMNS": columns}
    kernel, groups = ROUND_ROWS.get(kind, ROUND_ROWS_FP4), None
    if kind == "FP4":
        groups = torch.empty(rows, columns // GROUP, dtype=torch.float8_e4m3fn, device=x.device)
        given["groups"] = groups
    else:
        given["WAY"] = kernel.sizes["WAY"]
    launch(kernel, (rows,), tile_for(kernel.name, x.device), x.device, **given)
    return ScaledTensor(codes, scales, groups)


def operands(x: Tensor, weight: ScaledTensor, as_codes: bool) -> dict[str, Any]:
    """What both products of codes take: x [rows, columns], contiguous, and a weight. as_codes: x
    becomes codes too; else it stays, and kernels unpack the bytes of FP8."""
    if not as_codes:
        given = {"x": x, "x_groups": None, "x_scales": weight.scales}
        stored = {"weight": weight.codes.view(torch.uint8), "groups": None}
    else:
        held = round_rows(x, weight.kind)
        given = {"x": held.codes, "x_groups": held.groups, "x_scales": held.scales}
        stored = {"weight": weight.codes, "groups": weight.groups}
    return {**given, **stored, "scales": weight.scales}


GROUPS = ("x_groups", "groups")
"""The parameters of products that are addresses of groups' scales, which FP4 alone has."""


def of_groups(way: tl.constexpr) -> tuple[dict[str, str], tuple[str, ...]]:
    """The types of GROUPS in a product, and those that it is without; see `Kernel`."""
    has_groups = way.value == FP4_CODES.value
    return (dict.fromkeys(GROUPS, "*fp8e4nv:16"), ()) if has_groups else ({}, GROUPS)
