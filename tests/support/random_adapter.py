"""Adapters of random numbers, which change what a network says."""

from __future__ import annotations

import torch

from sfumato.model.adapters import Adapter, LowRank
from sfumato.model.network import Network
from sfumato.model.transformer import Linear


def random_adapter(
    network: Network, seed: int, parts: tuple[str, ...] = ("q_proj", "down_proj"), size: float = 0.3
) -> Adapter:
    """Rank 2, of all matrices that have one of these names; size: of its numbers."""
    generator, changes = torch.Generator().manual_seed(seed), {}
    for path, module in network.transformer.named_modules():
        if isinstance(module, Linear) and path.endswith(parts):
            out, inputs = module.weight.shape
            down, up = (
                torch.randn(shape, generator=generator) * size for shape in ((2, inputs), (out, 2))
            )
            changes[path] = LowRank(down, up, 1.0)
    return changes
