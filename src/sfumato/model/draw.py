"""Draws by inverse CDF, in the order of the token ids.

Knows masses, scores and uniforms; where they come from, the head knows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Float64, or the widest float that the device has (Apple's GPUs stop at float32)."""
    return x.float() if x.device.type == "mps" else x.double()


def locate(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the draws fall: the block int64 [positions], and how far into its mass, float64
    [positions] in [0, 1]. mass [positions, blocks]: of each block."""
    mass = wide(mass)
    ends = mass.cumsum(dim=1)
    # A uniform next to 1 may round up to the whole mass, past the last token that has any.
    below = torch.nextafter(ends[:, -1], torch.zeros_like(ends[:, -1]))
    target = torch.minimum(uniform.to(ends) * ends[:, -1], below)
    block = torch.searchsorted(ends, target[:, None], right=True).clamp(max=ends.shape[1] - 1)
    inside = target - (ends - mass).gather(1, block)[:, 0]
    return block[:, 0], (inside / mass.gather(1, block)[:, 0]).clamp(0, 1)


def inverse_cdf(scores: Tensor, inside: Tensor) -> Tensor:
    """The first index whose share of the cumulated mass exceeds `inside`: scores [n, c] → int64
    [n]. Relative to their own peak, scores may be the pass's but for rounding."""
    mass = wide((scores - scores.amax(dim=1, keepdim=True)).exp())
    ends = mass.cumsum(dim=1)
    places = torch.searchsorted(ends, (inside * ends[:, -1])[:, None], right=True)[:, 0]
    # Rounding can put the target at or past the end: take the last token with any mass.
    last = mass.shape[1] - 1 - (mass > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(places, last)
