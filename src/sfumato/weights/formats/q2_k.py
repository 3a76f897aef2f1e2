"""Q2_K: codes of two bits; a scale and a minimum of four bits for 16, bases of both for 256."""

from __future__ import annotations

from torch import Tensor

from sfumato.weights.formats.bits import fields
from sfumato.weights.formats.format import Format, Layout


def _codes(blocks: Tensor) -> Tensor:
    return fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    halves = {"bases": blocks[:, 80:82], "minimum_bases": blocks[:, 82:]}
    return {"codes": _codes(blocks), "scales": blocks[:, :16], **halves}


_LAYOUT = Layout(2, _parts, 0.09, (80, 82), group=16, two_levels=True, minima=True)
Q2_K = Format("Q2_K", 256, 84, _LAYOUT, 10)
