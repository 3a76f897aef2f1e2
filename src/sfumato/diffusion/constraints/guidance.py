"""What a constraint asks of the next denoising step of one canvas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Guidance:
    """For one step alone."""

    pins: Mapping[int, int]  # position → its fixed token
    masked: int = 0  # the position that `mask` is of
    mask: Tensor | None = None  # bool [tokens], on the host: which may stand there; None: all
