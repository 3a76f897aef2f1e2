"""One denoising step of any number of rows: a forward, a pass over the vocabulary, a settlement.

Rows share the two passes and nothing else; each has its own step, temperature, noise, sampler and
stopping rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.scoring import score
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network


@torch.no_grad()
def denoise_step(
    network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]
) -> list[Draft]:
    """Moves each canvas one step on; canvases[i] follows the prefix that slots[i] holds."""
    found = forward(network, canvases, slots)
    return [canvas.advance(stats) for canvas, stats in zip(canvases, found, strict=True)]


@torch.no_grad()
def forward(network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[HeadStats]:
    """What one forward finds on each canvas; changes none of them, so it may be repeated."""
    hidden = network.denoise(
        [canvas.tokens for canvas in canvases], slots, [canvas.soft for canvas in canvases]
    )
    return score(network.head, hidden, canvases)
