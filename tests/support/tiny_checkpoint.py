"""An untrained checkpoint of the embedded model's kind."""

from __future__ import annotations

from pathlib import Path

import torch

from sfumato.train.recipe import EMBEDDED, initialised, save_checkpoint
from sfumato.train.vocabulary import write_text_side


def save_tiny_checkpoint(folder: Path) -> Path:
    """Writes it into a folder, and returns the folder."""
    network = initialised(EMBEDDED, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.embed_tokens.weight.mul_(20)  # or every token would be as likely as any other
    save_checkpoint(network, folder)
    write_text_side(folder)
    return folder
