"""IQ4_NL: codes of four bits that are places in a table, with a float16 scale for 32."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sfumato.weights.formats.bits import (
    columns,
    fit_linear,
    half_bytes,
    inverse,
    low_nibbles,
)
from sfumato.weights.formats.format import Format, Layout
from sfumato.weights.formats.q4_0 import parts

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@lru_cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """The nearest of the table's values, float32, and its code, uint8, for each half-open cell of
    width ½ from -127 up to 113.5: no edge between two values lies within a cell."""
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    edges = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(torch.arange(-254, 228) / 2, edges, right=True)
    return values[codes].to(device), codes.to(device, torch.uint8)


def _encode(x: Tensor) -> Tensor:
    values, codes = _cells(x.device)

    def look_up(table: Tensor, scaled: Tensor) -> Tensor:
        cells = scaled.mul_(2).floor_().int().clamp_(-254, 227).add_(254)
        return table.index_select(0, cells.view(-1)).view_as(scaled)

    scale = fit_linear(columns(x, 32), 127, 10, lambda v: look_up(values, v))[:, None]
    picked = look_up(codes, x * inverse(scale))
    return torch.cat((half_bytes(scale), low_nibbles(picked)), dim=1)


IQ4_NL = Format("IQ4_NL", 32, 18, Layout(4, parts, 0.015, table=IQ4_VALUES), 20, encode=_encode)
