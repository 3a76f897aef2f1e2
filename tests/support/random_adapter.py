"""Random adapters: of every weight that one can change, or of some."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.model.adapter_files import AdapterFile, adaptable
from sfumato.model.adapters import Adapter, LowRank
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.transformer import Linear


def random_adapter(
    config: ModelConfig, rank: int = 3, alpha: float = 6.0, spread: float = 0.1
) -> AdapterFile:
    """Some changes have another rank or another scale."""
    generator, changes = torch.Generator().manual_seed(7), {}
    for path, (*stack, out, width) in adaptable(config).items():
        own = rank + 1 if path.endswith("layers.1.self_attn.q_proj") else rank
        down, up = (
            torch.randn(*stack, *shape, generator=generator) * spread
            for shape in ((own, width), (out, own))
        )
        changes[path] = LowRank(down, up, (0.5 if "k_proj" in path else 1.0) * alpha / own)
    return AdapterFile(changes, rank, alpha, "tiny")


def random_changes(
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


def tensor_name(path: str, change: LowRank) -> str:
    return path if change.up.ndim == 3 else f"{path}.weight"


def added(change: LowRank) -> Tensor:
    """What a change adds to the weight."""
    return change.up @ change.down * change.scale
