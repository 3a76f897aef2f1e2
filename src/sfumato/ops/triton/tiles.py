"""The checked-in table of tiles: which sizes each kernel has on which architecture.

Nothing is tuned while serving: a tile that depends on timings would make texts depend on them.
`tiles.toml` holds at most CANDIDATES tiles for a kernel, of which the first serves, and those that
a script measured to be the fastest on a device, which then serve there.  Knows no kernel.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from sfumato.ops.triton.targets import architecture

CANDIDATES = 6
ANY = "any"
"""The use of a tile where a kernel has one for all numbers of tokens."""


@dataclass(frozen=True)
class Tile:
    """The constants of a kernel that its speed depends on, its warps and its pipeline's stages."""

    constants: Mapping[str, int]
    warps: int
    stages: int

    def __getitem__(self, name: str) -> int:
        return self.constants[name]


@cache
def table() -> dict[str, Any]:
    """tiles.toml as it stands."""
    text = files("sfumato.ops.triton").joinpath("tiles.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def candidates(kernel: str, target: str) -> dict[str, tuple[Tile, ...]]:
    """The tiles of a kernel on an architecture by their use; the first serves where none has been
    measured."""
    tiles = table()["kernels"][kernel]
    uses = tiles[target] if target in tiles else tiles[table()["like"][target]]
    return {use: tuple(_tile(each) for each in tiles) for use, tiles in uses.items()}


def _tile(entry: Mapping[str, int]) -> Tile:
    constants = {name: value for name, value in entry.items() if name.isupper()}
    return Tile(constants, entry["warps"], entry["stages"])


@cache
def measured(kernel: str, device: torch.device) -> dict[str, Tile]:
    """The fastest tiles of a kernel by their use, on a device of a product that was measured."""
    tiles = _measured_product(device).get("tiles", {}).get(kernel, {})
    return {use: _tile(entry) for use, entry in tiles.items()}


def _measured_product(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    product: dict[str, Any] = table()["measured"].get(torch.cuda.get_device_name(device), {})
    return product


def tile_for(kernel: str, device: torch.device, use: str = ANY) -> Tile:
    """The tile of a kernel that serves on a device."""
    target = architecture(device)
    assert target is not None, f"{device}: kernels have no tiles for it"
    first = candidates(kernel, target)[use][0]
    return measured(kernel, device).get(use, first)


def slower(operation: str, device: torch.device) -> bool:
    """Whether the table says that torch serves this operation faster on this device."""
    return operation in _measured_product(device).get("slower", ())
