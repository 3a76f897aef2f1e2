"""What a batch reads of a new canvas, without a canvas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sfumato.diffusion.noise import Noise


def row_start(
    pinned: Tensor,
    noise: Noise,
    temperatures: list[float],
    cold: bool,
    self_conditioning: bool,
    begun: Tensor,
    hard_pins: bool = False,
) -> Any:
    """A canvas that is prepared."""
    config = SimpleNamespace(temperature=0 if cold else 1, self_conditioning=self_conditioning)
    return SimpleNamespace(
        pinned=pinned,
        noise=noise,
        temperatures=temperatures,
        config=config,
        begun=begun,
        hard_pins=hard_pins,
        commits=0,
        pace=[],
        mask_id=None,
    )
