"""The embedded model with two of its five layers: for what asks for a network and no sense."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sfumato
from sfumato.model.transformer import Transformer
from sfumato.train.recipe import save_checkpoint

KEPT = (1, 2)
"""A layer of each kind."""
_folders: list[TemporaryDirectory[str]] = []  # which go with the process


def shallow_network() -> Transformer:
    """Those layers between the embedding and the head, float32."""
    loaded = sfumato.load(device="cpu", dtype="float32").network
    layers = tuple(loaded.config.layers[index] for index in KEPT)
    network = Transformer(replace(loaded.config, layers=layers))
    state = {}
    for name, value in loaded.transformer.state_dict().items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer is None:
            state[name] = value
        elif int(layer[1]) in KEPT:
            state[f"layers.{KEPT.index(int(layer[1]))}.{name[layer.end() :]}"] = value
    network.load_state_dict(state)
    return network.requires_grad_(False)


@cache
def shallow_checkpoint() -> Path:
    """A folder with that network, which answers nonsense in half of the time."""
    _folders.append(TemporaryDirectory())
    folder = Path(_folders[-1].name) / "shallow"
    save_checkpoint(shallow_network(), folder)
    return folder
