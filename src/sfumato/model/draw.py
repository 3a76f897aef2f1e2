"""Draws by inverse CDF, in the order of the token ids: first the block, then a token of it.

Knows masses, scores and uniforms; the head knows where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.online_softmax import BLOCK


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
    # Rounding can put the target at or past the end: the last token with any mass is taken.
    last = mass.shape[1] - 1 - (mass > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(places, last)


class BlockMasses:
    """The masses of all blocks of the vocabulary, put in chunk by chunk."""

    def __init__(self, positions: int, chunks: int, chunk: int, device: torch.device) -> None:
        # Allocated before the first chunk: tensors kept between the chunks' buffers would keep the
        # allocator from reusing their memory.
        size = positions, chunks, -(-chunk // BLOCK)
        self._sums = torch.zeros(size, device=device)
        self._peaks = torch.empty(positions, chunks, device=device)

    def put(self, index: int, sums: Tensor, peak: Tensor) -> None:
        """The masses of one chunk [positions, blocks], relative to the peaks [positions]."""
        self._sums[:, index, : sums.shape[1]] = sums
        self._peaks[:, index] = peak

    def locate(self, peak: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """See `locate`; peak [positions]: that of the whole distribution."""
        self._sums *= (self._peaks - peak[:, None]).exp()[..., None]
        return locate(self._sums.flatten(1), uniform)


def block_ids(block: Tensor, chunk: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The ids int64 [positions, BLOCK] of each position's block, int64 [positions], and which of
    them, bool, are in its chunk and in the vocabulary."""
    per_chunk = -(-chunk // BLOCK)
    first = block // per_chunk * chunk
    columns = (block % per_chunk * BLOCK)[:, None] + torch.arange(BLOCK, device=block.device)
    ids = first[:, None] + columns
    return ids, (columns < chunk) & (ids < vocab_size)
