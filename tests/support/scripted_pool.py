"""What lets a scripted network, which knows rows, be called with packed canvases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.model_config import ModelConfig
from sfumato.model.segments import PaddedRows


class WithoutBlocks:
    """What a slot says of the blocks of the encode phase, and of adapters, where there are none."""

    offset = adapter = 0

    def whole_blocks(self, count: int, most: int) -> int:
        return min(count, most)


class ScriptedPool:
    """A pool of one scripted slot, without keys and values."""

    def __init__(self, slot: Any) -> None:
        self.members = [slot]
        self.keys: list[Tensor] = []
        self.lengths = torch.zeros(1, dtype=torch.int64)


class PackedCanvases:
    """Gives a network with `denoise(canvases, slots, softs)` a `denoise_batch`."""

    config: ModelConfig
    device: torch.device
    is_mixed = False
    tower = None
    image_mask = "model"

    @property
    def placement(self) -> Placement:
        return make_placement(self.device, len(self.config.layers))

    def denoise_batch(self, tokens: Tensor, soft: Tensor | None, attend: PaddedRows) -> Tensor:
        canvases, slots, softs = [], [], []
        first = 0
        for part in attend.parts:
            rows = zip(part.slots.tolist(), part.lengths.tolist(), strict=True)
            for slot, length in rows:
                at = slice(first, first + length)
                canvases.append(tokens[at])
                # The state of a canvas is written in place.
                softs.append(None if soft is None else soft[at].clone())
                slots.append(part.pool.members[slot])  # type: ignore[attr-defined]
                first += length
        network: Any = self
        hidden: Tensor = network.denoise(canvases, slots, softs)
        return hidden
