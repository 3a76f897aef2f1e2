"""Untrained checkpoints of the embedded models' kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sfumato.model.families import Family
from sfumato.model.model_config import Borders
from sfumato.train.recipe import EMBEDDED, MASKS, initialised, save_checkpoint
from sfumato.train.vocabulary import QWEN, write_text_side


def save_tiny_checkpoint(folder: Path) -> Path:
    """Writes it into a folder, and returns the folder."""
    network = initialised(EMBEDDED, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.embed_tokens.weight.mul_(20)  # or every token would be as likely as any other
    save_checkpoint(network, folder)
    write_text_side(folder)
    return folder


def save_tiny_blocks(folder: Path, family: Family, borders: Borders, block: int) -> Path:
    """Writes an untrained network of blocks into a folder, and returns the folder."""
    design = replace(MASKS.design, borders=borders)
    config = replace(MASKS, canvas_length=block, design=design)
    network = initialised(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    save_checkpoint(network, folder, family=family, side=QWEN)
    return folder
