"""Q6_K: codes of six bits from -32; an int8 scale for 16, a base for 256."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import (
    columns,
    extreme,
    fields,
    finite_half,
    fit_linear,
    integers,
    inverse,
    join,
)
from sfumato.weights.formats.format import Format, Layout


def _codes(blocks: Tensor) -> Tensor:
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    return low | (fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256) << 4)


def with_scales(x: Tensor, inverses: Tensor, group_codes: Tensor, scale: Tensor) -> Tensor:
    """Blocks of float32 [n, 256] times `inverses` [n, 16, 1] rounded, with the scales of groups,
    float32 [n, 16] integers, times float16 [n, 1]."""
    scaled = (x.view(-1, 16, 16) * inverses).round_().clamp_(-32, 31)
    codes = integers(scaled.add_(32), 63)
    low = join((codes & 15).view(-1, 2, 2, 64), 4).view(-1, 128)
    high = join((codes >> 4).view(-1, 2, 4, 32), 2).view(-1, 64)
    ends = group_codes.to(torch.int8).view(torch.uint8), scale.view(torch.uint8)
    return torch.cat((low, high, *ends), dim=1)


def _encode(x: Tensor) -> Tensor:
    groups = fit_linear(columns(x, 16), 32, 1, lambda v: v.round_().clamp_(-32, 31)).view(-1, 16)
    scale = extreme(groups) / -128
    group_codes = (groups * inverse(scale)).round_().clamp_(-128, 127)
    scale = finite_half(scale)
    step = (scale.float() * group_codes)[:, :, None]
    return with_scales(x, inverse(step), group_codes, scale)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": _codes(blocks), "scales": blocks[:, 192:208], "bases": blocks[:, 208:]}


Q6_K = Format(
    *("Q6_K", 256, 210, Layout(6, _parts, 0.0007, (208,), group=16, two_levels=True), 14),
    encode=_encode,
)
