"""Q5_K: codes of five bits, and otherwise as Q4_K."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.weights.formats.bits import fields, join
from sfumato.weights.formats.format import Format, Layout
from sfumato.weights.formats.q4_k import head_and_codes, nibbles, of_nibbles, planes


def _codes(blocks: Tensor) -> Tensor:
    top = fields(blocks[:, None, 16:48], 1).reshape(-1, 256)
    return of_nibbles(blocks[:, 48:]) | (top << 4)


def _encode(x: Tensor) -> Tensor:
    head, codes = head_and_codes(x, 31)
    top = join((codes >> 4).view(-1, 1, 8, 32), 1)[:, 0]
    return torch.cat((head, top, nibbles(codes & 15)), dim=1)


def _parts(blocks: Tensor) -> dict[str, Tensor]:
    return planes(blocks, _codes(blocks))


Q5_K = Format(
    *("Q5_K", 256, 176, Layout(5, _parts, 0.002, (0, 2), two_levels=True, minima=True), 13),
    encode=_encode,
)
