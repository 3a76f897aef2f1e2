"""Untrained checkpoints, one of each family, which run in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sfumato.model.families import DIFFUSION_GEMMA, Family
from sfumato.model.model_config import ModelConfig
from sfumato.train.recipe import EMBEDDED, MASKS, initialised, save_checkpoint
from sfumato.train.vocabulary import GEMMA, QWEN, TextSide


@dataclass(frozen=True)
class Tiny:
    """What the checkpoint of a family is made of.

    spread: what matrices are multiplied by, or else the embedding alone: without that each token
    would be as likely as any other; causal: whether the family has the causal mode.
    """

    config: ModelConfig
    side: TextSide
    spread: float | None = None
    causal: bool = False


_SHORT = replace(MASKS, layers=MASKS.layers[:2])
_SDAR = replace(
    _SHORT, canvas_length=4, design=replace(MASKS.design, borders="front", tied_head=False)
)
_EXPERTS = {"intermediate_size": 0, "num_experts": 6, "experts_per_token": 2, "expert_size": 48}

TINY = {
    "diffusion_gemma": Tiny(replace(EMBEDDED, layers=EMBEDDED.layers[:3]), GEMMA, causal=True),
    "sdar": Tiny(_SDAR, QWEN, 5.0),
    "sdar_moe": Tiny(replace(_SDAR, **_EXPERTS), QWEN, 5.0),
    "bd3lm": Tiny(replace(_SHORT, canvas_length=16), QWEN, 5.0),
}
"""By the name of the family: a new family needs an entry here, and no test of its own."""


def save_tiny_checkpoint(folder: Path, family: Family = DIFFUSION_GEMMA) -> Path:
    """Writes that of a family into a folder, and returns the folder."""
    tiny = TINY[family.name]
    network = initialised(tiny.config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        if tiny.spread is None:
            network.embed_tokens.weight.mul_(20)
        for parameter in network.parameters():
            if tiny.spread is not None and parameter.ndim > 1:
                parameter.mul_(tiny.spread)
    save_checkpoint(network, folder, family=family, side=tiny.side)
    return folder
