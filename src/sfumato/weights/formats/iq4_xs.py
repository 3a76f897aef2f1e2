"""IQ4_XS: the codes of IQ4_NL; a scale of six bits for 32, a base for 256."""

from __future__ import annotations

from torch import Tensor

from sfumato.weights.formats.bits import fields
from sfumato.weights.formats.format import Format, Layout
from sfumato.weights.formats.iq4_nl import IQ4_VALUES


def _codes(blocks: Tensor) -> Tensor:
    return fields(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)


def _scale_codes(blocks: Tensor) -> Tensor:
    """The scales of the 8 groups, 32 too high: uint8 [n, 8]."""
    low = fields(blocks[:, 4:8, None], 4).reshape(-1, 8)
    return low | (fields(blocks[:, 2:4, None], 2).reshape(-1, 8) << 4)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    # Modulo 256: the byte of the int8 that is 32 lower.
    scales = _scale_codes(blocks) - 32
    return {"codes": _codes(blocks), "scales": scales, "bases": blocks[:, :2]}


_LAYOUT = Layout(4, _parts, 0.0008, two_levels=True, table=IQ4_VALUES)
IQ4_XS = Format("IQ4_XS", 256, 136, _LAYOUT, 23)
