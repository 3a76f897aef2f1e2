"""IQ3_XXS: places in a grid of 256 times four magnitudes; signs and a scale of four bits for 32.

On a GPU torch dequantizes it: numbers from a grid would need kernels of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import floats
from sfumato.weights.formats.format import Format
from sfumato.weights.formats.iq3_grids import XXS_GRID, XXS_LEVELS, numbers_of, signed


def _words(words: Tensor) -> tuple[Tensor, Tensor]:
    """What the words hold, uint8 [n, 4 · g]: the signs uint8 [n, 4 · g], and the scales' codes
    int32 [n, g].

    A word of four bytes is that of a group: four times seven signs, the lowest first, and a scale
    of four bits. An eighth sign makes the number of set bits even.
    """
    parts = words.reshape(len(words), -1, 4).int()
    word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    seven = torch.stack([word >> shift & 127 for shift in (0, 7, 14, 21)], dim=2)
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    signs = (seven | ((parity ^ parity >> 1) & 1) << 7).to(torch.uint8).flatten(1)
    return signs, word >> 28 & 15


def _dequantize(blocks: Tensor) -> Tensor:
    """Behind 64 places of the grid stands a word for each of 8 groups."""
    signs, codes = _words(blocks[:, 66:])
    scale = floats(blocks[:, :2]) * (0.5 + codes.float()) * 0.5
    grid = numbers_of(XXS_GRID, XXS_LEVELS, blocks.device)
    return signed(grid[blocks[:, 2:66].int()], signs, scale)


IQ3_XXS = Format("IQ3_XXS", 256, 98, _dequantize, 18)
