"""What the formats of this folder share: bytes of blocks taken apart and put together, and scales
that fit a block's values best.

Layouts and the order of the float operations follow ggml (`ggml-common.h`, `ggml-quants.c`), so
that results equal ggml's bit for bit. Everything runs on the device of the data.

The search for scales (`fit_affine`, `fit_linear`) is in the spirit of ggml's `make_qkx2_quants` and
`make_qx_quants`: some scales near the obvious one are tried, and each attempt's codes give the
scale that suits them best in closed form (weighted least squares). Here a few starts are followed
by rounds of refinement from the best so far, which comes within one per cent of ggml's error with a
third of its attempts. Groups lie along columns (float32 [width, groups]), so that sums over a group
run along whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

HALF_LIMIT = 65520.0
"""From here on a float rounds to an infinite float16."""


def floats(plane: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Bytes uint8 [n, width] of floats, as float32."""
    # A fresh copy is aligned for the view; a slice of one block need not be.
    return plane.clone(memory_format=torch.contiguous_format).view(dtype).float()


def fields(packed: Tensor, bits: int) -> Tensor:
    """Splits bytes, lowest bits first: uint8 [n, groups, width] to [n, groups, 8 / bits, width]."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=2)


def join(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes, lowest bits first: uint8 [n, groups, 8 / bits, width] to [n, groups, width].

    The reverse of `fields`.
    """
    out = codes[:, :, 0].clone()
    for index in range(1, 8 // bits):
        out |= codes[:, :, index] << (bits * index)
    return out


def in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n] below 2^bits in bytes [rows, n · bits / 8], the first one lowest."""
    return join(codes.view(len(codes), -1, 8 // bits, 1), bits)[..., 0]


def of_bytes(plane: Tensor, bits: int) -> Tensor:
    """The reverse of `in_bytes`."""
    return fields(plane[:, :, None], bits).flatten(1)


def low_nibbles(codes: Tensor) -> Tensor:
    """uint8 [n, 32] → the low four bits of each, uint8 [n, 16]."""
    return join((codes & 15).view(-1, 1, 2, 16), 4)[:, 0]


def of_nibbles(low: Tensor) -> Tensor:
    """The reverse of `low_nibbles`."""
    return fields(low[:, None], 4).reshape(-1, 32)


def fifth_bits(codes: Tensor) -> Tensor:
    """uint8 [n, 32] → bit 4 of each, uint8 [n, 4]."""
    return join((codes >> 4).view(-1, 4, 8, 1), 1)[:, :, 0]


def five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Five-bit codes, uint8 [n, 32]: bit 4 of each from `high` [n, 4], the rest from `low`."""
    return of_nibbles(low) | (fields(high[:, :, None], 1).reshape(-1, 32) << 4)


@lru_cache
def on_device(table: tuple[float, ...], device: torch.device) -> Tensor:
    """A table of numbers, float32 [n]."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def finite_half(values: Tensor) -> Tensor:
    """float32 [n, 1] → float16 [n, 1]. Raises ValueError unless all of it is finite."""
    if not bool(values.abs().max() < HALF_LIMIT):  # NaN too is refused
        raise ValueError("a value is not finite, or too large for a block's float16 scale")
    return values.half()


def half_bytes(values: Tensor) -> Tensor:
    """float32 [n, 1] → the bytes of float16, uint8 [n, 2]; raises as `finite_half`."""
    return finite_half(values).view(torch.uint8)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is not finite: a scale of 0, or next to it."""
    reciprocal = scale.reciprocal()
    return reciprocal.masked_fill_(reciprocal.isinf(), 0)


def integers(values: Tensor, levels: int) -> Tensor:
    """The integer part of each value, at most `levels`: float32, from 0 to 127, to uint8."""
    return values.to(torch.int8).clamp_(max=levels).view(torch.uint8)  # to uint8 torch is slow


def extreme(x: Tensor) -> Tensor:
    """The value of greatest magnitude in each row, the first of equals: [n, width] to [n, 1]."""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def signed_codes(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale bytes and codes 0..levels of the formats whose extreme value is code 0."""
    middle = (levels + 1) // 2
    scale = extreme(x) / -middle
    return half_bytes(scale), integers((x * inverse(scale)).add_(middle + 0.5), levels)


def columns(x: Tensor, width: int) -> Tensor:
    """Blocks [n, block size] as groups along columns: [width, groups]."""
    return x.view(-1, width).t().contiguous()


def scale_bytes(scales: Tensor, blocks: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """float32 [rows, 1 or blocks, 1] → the float16 or bfloat16 of each block, uint8
    [rows, blocks, 2]. Raises ValueError where float16 cannot hold one."""
    if dtype == torch.float16 and not bool(scales.max() < HALF_LIMIT):
        raise ValueError("a scale is too large for a block's float16 scale")
    halves = scales.to(dtype).contiguous().view(torch.uint8)
    return halves.expand(*blocks.shape[:2], 2)


_STARTS = (-1.0, -0.4, 0.2, 0.8)
"""By how many gaps between two values the first attempts stretch the range."""
_ROUNDS = 2


def fit_affine(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and offset, both ≥ 0, of x ≈ scale · code − offset with codes 0..levels.

    x: float32 [width, groups] → two of float32 [groups]. An error counts in proportion to
    |x| + rms(x), as ggml has it.
    """
    weight = x.abs().add_((_sum(x.square()) / len(x)).sqrt_())
    weighted = weight * x
    total, total_x = _sum(weight), _sum(weighted)
    least = x.amin(0).clamp_(max=0)
    span = x.amax(0) - least
    codes, buffer = torch.empty_like(x), torch.empty_like(x)
    gain = torch.full_like(span, -torch.inf)  # what the fit takes off Σ weight · x²
    scale, low = span / levels, least

    def attempt(origin: Tensor, inverse: Tensor) -> None:
        nonlocal gain, scale, low
        torch.sub(x, origin, out=codes).mul_(inverse).round_().clamp_(0, levels)
        products = _sum(torch.mul(weighted, codes, out=buffer))
        first = _sum(torch.mul(weight, codes, out=buffer))
        second = _sum(buffer.mul_(codes))
        spread = total * second - first * first
        steep = (total * products - total_x * first) / spread
        floor = (second * total_x - first * products) / spread
        # The format stores no offset below zero: there the line goes through the origin.
        through = floor > 0
        steep = torch.where(through, products / second, steep)
        floor = floor.masked_fill(through, 0)
        scored = steep * products + floor * total_x
        better = scored > gain  # never where a group is constant: all of its figures are NaN
        gain = torch.where(better, scored, gain)
        scale, low = torch.where(better, steep, scale), torch.where(better, floor, low)

    for stretch in _STARTS:
        attempt(least, (levels + stretch) / span)
    for _ in range(_ROUNDS):
        attempt(low, 1 / scale)
    return scale.clamp_(min=0), -low


def fit_linear(x: Tensor, top: float, gap: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """The scale of x ≈ scale · value, where values are what `nearest` rounds to.

    x: float32 [width, groups] → float32 [groups], 0 where all of a group is. `top` is the
    magnitude of the values' outermost, a negative one, and `gap` about what lies between two
    values; `nearest` maps [width, groups] to the values nearest to it, and may do so in place. An
    error counts in proportion to x², as ggml has it.
    """
    weight = x.square()
    weighted = weight * x
    highest, lowest = x.amax(0), x.amin(0)
    peak = torch.where(highest > -lowest, highest, lowest)
    gain, scale = torch.zeros_like(peak), peak / -top
    buffer = torch.empty_like(x)

    def attempt(inverse: Tensor) -> None:
        nonlocal gain, scale
        values = nearest(x * inverse)
        products = _sum(torch.mul(weighted, values, out=buffer))
        second = _sum(torch.mul(weight, values, out=buffer).mul_(values))
        steep = products / second
        scored = steep * products
        better = scored > gain  # never where all squares are zero or infinite: scored is NaN
        gain, scale = torch.where(better, scored, gain), torch.where(better, steep, scale)

    for stretch in _STARTS:
        attempt(-(top + gap * stretch) / peak)
    for _ in range(_ROUNDS):
        attempt(1 / scale)
    return scale


def _sum(x: Tensor) -> Tensor:
    """The sum of each column, float32 [2^n, groups] → [groups], always in the same order.

    torch's own depends on the number of columns and of threads, and so would the blocks.
    """
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]
