"""Scales that fit a block's values best: the search behind the quantizers of `quantize.py`.

In the spirit of ggml's `make_qkx2_quants` and `make_qx_quants`: some scales near the obvious one
are tried, and each attempt's codes give the scale that suits them best in closed form (weighted
least squares). Here a few starts are followed by rounds of refinement from the best so far, which
comes within one per cent of ggml's error with a third of its attempts. Groups lie along columns
(float32 [width, groups]), so that sums over a group run along whole rows. Knows no byte layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    codes, scratch = torch.empty_like(x), torch.empty_like(x)
    gain = torch.full_like(span, -torch.inf)  # what the fit takes off Σ weight · x²
    scale, low = span / levels, least

    def attempt(origin: Tensor, inverse: Tensor) -> None:
        nonlocal gain, scale, low
        torch.sub(x, origin, out=codes).mul_(inverse).round_().clamp_(0, levels)
        products = _sum(torch.mul(weighted, codes, out=scratch))
        first = _sum(torch.mul(weight, codes, out=scratch))
        second = _sum(scratch.mul_(codes))
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
    scratch = torch.empty_like(x)

    def attempt(inverse: Tensor) -> None:
        nonlocal gain, scale
        values = nearest(x * inverse)
        products = _sum(torch.mul(weighted, values, out=scratch))
        second = _sum(torch.mul(weight, values, out=scratch).mul_(values))
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
