"""The planes of formats whose codes name four numbers at once: IQ3_XXS and IQ3_S.

A code is a place in the format's grid, which stands in memory before the planes, four bytes for
each place: kernels and this module read it there.  Signs, and scales of four bits, are kept as the
file keeps them, so that the planes take no more than the file.  Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sfumato.weights.blocks import iq3_grid, iq3_signed, iq3_xxs_words

SUPER = 256  # as in `planes`
PLACES: Mapping[str, int] = {"IQ3_XXS": 256, "IQ3_S": 512}
"""Of the grid of each format."""


def grid_bytes(format: str) -> int:
    """Of the grid that stands before a format's planes."""
    return 4 * PLACES[format]


def grid_of(format: str, device: torch.device) -> Tensor:
    """The grid as it stands before the planes: uint8 [grid_bytes], the first number first."""
    return iq3_grid(format, device).to(torch.uint8).flatten()


def widths(format: str, columns: int) -> dict[str, int]:
    """As `planes.Layout.widths`: the low bytes of places; then the words of IQ3_XXS, signs and
    scale of 32 elements, or the ninth bits, signs and scales of IQ3_S; at last the bases."""
    if format == "IQ3_XXS":
        rest = {"words": columns // 8}
    else:
        rest = {"high": columns // 32, "signs": columns // 8, "scales": columns // 64}
    return {"low": columns // 4, **rest, "bases": columns // SUPER * 2}


def parts(format: str, blocks: Tensor) -> dict[str, Tensor]:
    """The bytes of each plane, of blocks uint8 [n, block_bytes]."""
    low, bases = blocks[:, 2:66], blocks[:, :2]
    if format == "IQ3_XXS":
        return {"low": low, "words": blocks[:, 66:], "bases": bases}
    high, signs, scales = blocks[:, 66:74], blocks[:, 74:106], blocks[:, 106:]
    return {"low": low, "high": high, "signs": signs, "scales": scales, "bases": bases}


def values(planes: Mapping[str, Tensor], format: str) -> Tensor:
    """float32 [rows, columns] of planes, in the order of operations of the blocks' own floats."""
    low = planes["low"]
    halves = planes["bases"].clone(memory_format=torch.contiguous_format).view(torch.float16)
    bases = halves.float().repeat_interleave(SUPER // 32, dim=1)
    if format == "IQ3_XXS":
        signs, codes = iq3_xxs_words(planes["words"])
        return _signed(low.int(), signs, bases * (0.5 + codes.float()) * 0.5, format)
    places = low.int() | _bits(planes["high"], 1).int() << 8
    scales = bases * (1 + 2 * _bits(planes["scales"], 4).float())
    return _signed(places, planes["signs"], scales, format)


def _signed(places: Tensor, signs: Tensor, scales: Tensor, format: str) -> Tensor:
    return iq3_signed(iq3_grid(format, places.device)[places], signs, scales)


def _bits(plane: Tensor, bits: int) -> Tensor:
    """The numbers of some bits in bytes [rows, n], the lowest bits first: [rows, n · 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return ((plane[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)
