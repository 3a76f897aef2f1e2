"""A small model that reads pictures, and messages that show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.support.pictures import picture
from tests.support.shallow_model import shallow_network

import sfumato
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.train import recipe


def seeing_model(folder: Path, is_shallow: bool = False) -> sfumato.Model:
    """The embedded text network with a tower of random weights, which the replies depend on: they
    are nonsense that never settles, so a canvas has few steps. is_shallow: both of two layers."""
    network = shallow_network() if is_shallow else recipe.load_weights(Path(sfumato.load().path))
    config = replace(recipe.TOWER, num_layers=2) if is_shallow else recipe.TOWER
    tower = recipe.new_tower(config, torch.Generator().manual_seed(1)).requires_grad_(False)
    tower.projection.weight.mul_(20)
    recipe.save_checkpoint(network, folder, tower, sampler=replace(REFERENCE, max_steps=8))
    return sfumato.load(folder, device="cpu")


def with_markers(folder: Path) -> Path:
    """The checkpoint in this folder with the family's own token of a picture, by which a GGUF file
    that is made of it finds that token."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("<mask>", "<|image|>"), encoding="utf-8")
    return folder


def shown(*content: str | int) -> list[dict[str, Any]]:
    """A user's message: texts, and pictures by their number."""
    return [{"role": "user", "content": [part(each) for each in content]}]


def part(content: str | int) -> dict[str, Any]:
    if isinstance(content, str):
        return {"type": "text", "text": content}
    return {"type": "image", "image": picture(40, 40, content)}
