"""8-bit codes in kernels: how rows of activations become codes, and how codes are multiplied.

Weights come as `ScaledTensor`: codes and a scale for each row.  A kernel with a constant WAY serves
three ways of one product, all with float32 or int32 sums and with the scales applied once, after
the last of them:

- FP8_CODES and INT8_CODES multiply codes by codes: those of activations are made on the device, a
  row at a time (`round_rows`).
- FP8_BYTES multiplies e4m3 codes, unpacked by integers, by the activations as they are, for GPUs
  whose matrix units take no e4m3 and whose compiler knows no such type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import product
from sfumato.weights.formats import CODES, LEAST, MOST, Kind, ScaledTensor

FP8_CODES = tl.constexpr(0)
INT8_CODES = tl.constexpr(1)
FP8_BYTES = tl.constexpr(2)

_FP8_MOST = tl.constexpr(MOST["FP8"])
_INT8_MOST = tl.constexpr(MOST["INT8"])
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
    MOST_CODE: tl.constexpr = _INT8_MOST if WAY == INT8_CODES else _FP8_MOST
    tl.store(scales + row, top * (1 / MOST_CODE) + tl.sum(spoiled, 0))
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


def round_rows(x: Tensor, kind: Kind) -> ScaledTensor:
    """x [rows, columns], contiguous, as codes with a scale for each row."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=CODES[kind], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel = ROUND_ROWS[kind]
    tile = tile_for(kernel.name, x.device)
    launch(kernel, (rows,), tile, x.device, x=x, codes=codes, scales=scales, COLUMNS=columns,
           WAY=kernel.sizes["WAY"])  # fmt: skip
    return ScaledTensor(codes, scales)
