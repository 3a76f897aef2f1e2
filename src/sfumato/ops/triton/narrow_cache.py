"""How keys and values of a cache become numbers: as they are stored, or of 8 bits unpacked in
registers. The formats are those of `ops.narrow_cache`.

E4M3 is packed and unpacked by integers: Triton has no such numbers for GPUs before sm_89.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import narrow_cache
from sfumato.ops.narrow_cache import (
    FORMATS,
    FP8,
    NUMBERS,
    Q8_0,
    Q8_0_BLOCK,
    is_narrow,
    stored_width,
)
from sfumato.ops.triton.kernel import Kernel
from sfumato.ops.triton.operands import ALIGNMENT, matrix, multiplied
from sfumato.ops.triton.weights import as_descriptor, e4m3_value, spread

E4M3 = tl.constexpr(NUMBERS[FP8])
_BLOCK = tl.constexpr(Q8_0_BLOCK)


@triton.jit
def as_held(
    held: tl.tensor, lines: tl.tensor, COLUMNS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    CACHE: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What `held_block` reads of a matrix [lines, COLUMNS] in blocks [KEYS, D]: a descriptor, or
    the address of narrow lines."""
    if CACHE:
        return held
    else:
        return as_descriptor(held, lines, COLUMNS, KEYS, D, DESCRIPTORS)


@triton.jit
def held_block(
    held: tl.tensor, line: tl.tensor, column: tl.tensor, lines: tl.tensor, KEYS: tl.constexpr,
    D: tl.constexpr, CACHE: tl.constexpr, DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Keys or values [KEYS, D] from a line on, in the dtype that is multiplied: narrow ones are
    rounded to it once. Zeros past the last of the lines.

    column: 0 of narrow lines, each of which has one head's numbers.
    """
    if CACHE:
        return _unpacked(held, line, lines, KEYS, D, CACHE).to(DTYPE)
    else:
        return held.load([line, column])


@triton.jit
def _unpacked(
    held: tl.tensor, line: tl.tensor, lines: tl.tensor, KEYS: tl.constexpr, D: tl.constexpr,
    CACHE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Narrow lines from one on as float32 [KEYS, D], the numbers that `ops.narrow_cache.widened`
    gives. One address of 64 bits, and offsets of 32."""
    number = tl.arange(0, KEYS)[:, None]
    column = tl.arange(0, D)[None, :]
    known = number < lines - line
    if CACHE == E4M3:
        first = held + tl.cast(line, tl.int64) * D
        return e4m3_value(tl.load(first + (number * D + column), mask=known, other=0))
    else:
        GROUP: tl.constexpr = D if D < _BLOCK else _BLOCK
        GROUPS: tl.constexpr = D // GROUP
        WIDTH: tl.constexpr = D + 2 * GROUPS
        first = held + tl.cast(line, tl.int64) * WIDTH
        stored = tl.load(first + (number * WIDTH + column), mask=known, other=0)
        halves = (first + D).to(tl.pointer_type(tl.float16))
        at = number * (WIDTH // 2) + tl.arange(0, GROUPS)[None, :]
        scale = tl.load(halves + at, mask=known, other=0.0)
        value = stored.to(tl.int8, bitcast=True).to(tl.float32)
        return value * spread(scale.to(tl.float32), KEYS, D)


@triton.jit
def e4m3_byte(value: tl.tensor) -> tl.tensor:
    """float32 as bytes of e4m3, rounded to the nearest, of two to the even one, and clamped."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(value), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    # 20 bits of the mantissa go, and the exponent counts from 2⁻⁷ rather than from 2⁻¹²⁷.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ numbers are multiples of 2⁻⁹, which is the last bit of 2¹⁴ in float32.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(value != value, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def q8_0_block(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of float32 [n, a block's numbers] the codes as bytes [n, a block's], and scales float16
    [n]. A block with NaN gets NaN as its scale."""
    is_nan = tl.max((value != value).to(tl.int32), 1) > 0
    known = tl.where(value != value, 0.0, value)
    scale = tl.minimum(tl.math.div_rn(tl.max(tl.abs(known), 1), 127.0), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    inverse = tl.where(wide == 0.0, 0.0, tl.math.div_rn(1.0, tl.where(wide == 0.0, 1.0, wide)))
    code = tl.minimum(tl.maximum(known * inverse[:, None], -127.0), 127.0)
    # The last bit of 1.5 · 2²³ in float32 is 1: a sum with it is rounded to whole numbers.
    code = (code + 12582912.0) - 12582912.0
    code = tl.where(is_nan[:, None], 0.0, code)
    return code.to(tl.int8).to(tl.uint8, bitcast=True), tl.where(is_nan, float("nan"), scale)


def narrow(kernel: Kernel, types: Mapping[str, str]) -> Kernel:
    """The same kernel over a narrow cache, whose tiles are its own: of Q8_0, and of FP8 and in its
    variants as shapes, which take long to compile and are no other sums."""
    shapes: dict[str, dict[str, Any]] = {"fp8": {"CACHE": NUMBERS[FP8]}}
    for variant, differing in kernel.variants.items():
        shapes |= {variant: dict(differing), f"fp8 {variant}": {**differing, **shapes["fp8"]}}
    name = f"{kernel.name}_narrow"
    sizes: dict[str, Any] = {**kernel.sizes, "CACHE": NUMBERS[Q8_0]}
    return replace(kernel, name=name, types=types, sizes=sizes, variants={}, shapes=shapes)


def checks_of(
    operation: str, check: Callable[..., None]
) -> dict[str, Callable[[torch.device], None]]:
    """The self-tests of an operation by the name of its twin: over a cache of floats, and of each
    narrow kind. check: of a device and the kind."""
    kinds: dict[str, torch.dtype | None] = {operation: None}
    kinds |= {f"{operation} {format}": dtype for dtype, format in FORMATS.items()}
    return {name: partial(check, kind=dtype) for name, dtype in kinds.items()}


def attended(new: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether kernels multiply these new queries, keys and values with these held ones, all of one
    kind: floats as the new ones are, or narrow."""
    if not is_narrow(held[0].dtype):
        return multiplied(*new, *held)
    d, kind = new[0].shape[-1], held[0].dtype
    return multiplied(*new) and all(x.dtype == kind and takes_narrow(x, d) for x in held)


def held_matrix(held: Tensor, rows: int, d: int) -> Any:
    """What a kernel takes as keys or values [..., stored width], in blocks of rows."""
    return narrow_cache.as_bytes(held) if is_narrow(held.dtype) else matrix(held, rows, d)


def cache_of(held: Tensor) -> int:
    """The constant CACHE of keys or values."""
    return NUMBERS.get(held.dtype, 0)


def takes_narrow(held: Tensor, d: int) -> bool:
    """Whether kernels read these keys or values of heads of size d: narrow, packed and aligned, of
    a power of two."""
    shaped = d & (d - 1) == 0 and held.shape[-1] == stored_width(d, held.dtype)
    return is_narrow(held.dtype) and shaped and held.data_ptr() % ALIGNMENT == 0
