"""IQ3_S: places in a grid of 512 times four magnitudes; signs, and a scale of four bits for 32.

On a GPU torch dequantizes it, as IQ3_XXS.
"""

from __future__ import annotations

from torch import Tensor

from sfumato.weights.formats.bits import fields, floats
from sfumato.weights.formats.format import Format
from sfumato.weights.formats.iq3_grids import S_GRID, S_LEVELS, numbers_of, signed


def _dequantize(blocks: Tensor) -> Tensor:
    """Places of nine bits, whose top ones stand behind the others; then 32 bytes of signs, and a
    scale of four bits for each of 8 groups."""
    top = fields(blocks[:, 66:74, None], 1).reshape(-1, 64).int()
    grid = numbers_of(S_GRID, S_LEVELS, blocks.device)
    numbers = grid[blocks[:, 2:66].int() | top << 8]
    scales = fields(blocks[:, 106:, None], 4).reshape(-1, 8).float()
    return signed(numbers, blocks[:, 74:106], floats(blocks[:, :2]) * (1 + 2 * scales))


IQ3_S = Format("IQ3_S", 256, 110, _dequantize, 21)
