"""The checked-in table of tiles: which sizes each kernel has on which architecture.

Nothing is tuned while serving: a tile that depends on timings would make texts depend on them.
`tiles.toml` holds at most CANDIDATES tiles for a kernel, of which the first serves, and those that
a script measured to be the fastest on a device, which then serve there.

The GPUs that kernels are compiled for are here too: architecture names and shared memory.  Knows no
kernel, and needs neither Triton nor a GPU.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """One architecture. `shared` is the bytes of shared memory that one program may have: a
    compiler accepts more, and the launch then fails."""

    name: str
    backend: str  # as Triton names it
    number: int | str  # the architecture, as Triton names it
    warp: int  # threads
    shared: int
    copies: bool  # has an engine that copies blocks to shared memory by tensor descriptors
    e4m3: bool = False  # its matrix units take e4m3 as files have it; gfx942 has another bias


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 166_912, False),
        Target("sm_86", "cuda", 86, 32, 101_376, False),
        Target("sm_89", "cuda", 89, 32, 101_376, False, True),
        Target("sm_90", "cuda", 90, 32, 232_448, True, True),
        Target("sm_100", "cuda", 100, 32, 232_448, True, True),
        Target("sm_120", "cuda", 120, 32, 101_376, True, True),
        Target("gfx942", "hip", "gfx942", 64, 65_536, False),
        Target("gfx1151", "hip", "gfx1151", 32, 65_536, False),
    )
}

INTERPRETED = "sm_90"
"""Whose tiles serve where kernels are interpreted."""

_SAME_TILES = {
    "sm_87": "sm_80",
    **dict.fromkeys(("sm_103", "sm_110"), "sm_100"),
    "sm_121": "sm_120",
    **dict.fromkeys(("gfx90a", "gfx950"), "gfx942"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1103"), "gfx1151"),
    **dict.fromkeys(("gfx1150", "gfx1152", "gfx1200", "gfx1201"), "gfx1151"),
}
"""Architectures with no less shared memory than another, and no fewer of the instructions that its
kernels use; each operation is tried before it serves."""


@cache
def architecture(device: torch.device) -> str | None:
    """The name of a device's architecture in TARGETS; None where no tiles fit the device.

    A CPU has that of the interpreter.
    """
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda":
        return None
    own = own_architecture(device)
    name = own if isinstance(own, str) else f"sm_{own}"
    name = _SAME_TILES.get(name, name)
    return name if name in TARGETS else None


def own_architecture(device: torch.device) -> int | str:
    """The architecture of a GPU itself, as Triton names it; `architecture` is that of its tiles."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return int(properties.major * 10 + properties.minor)


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels get matrices as tensor descriptors on a device; see `Target.copies`."""
    name = architecture(device)
    return name is not None and TARGETS[name].copies


FEW = 512
"""Up to this many tokens, a matrix product has the tile for few of them."""


def use_for(tokens: int) -> str:
    """Which tile of a matrix product serves a number of tokens; see tiles.toml."""
    return "few" if tokens <= FEW else "many"


def most_tiles(count: int, experts: int, tile: int) -> int:
    """How many tiles of at most `tile` assignments the worst choice makes of `count`: each expert
    that is chosen at all may have one that is not full."""
    used = min(count, experts)
    return (count + used * (tile - 1)) // tile


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
    uses = _of_target(table()["kernels"][kernel], target)
    return {use: tuple(_tile(each) for each in tiles) for use, tiles in uses.items()}


def unpacking(kernel: str, format: str, target: str) -> float:
    """The instructions for each weight in planes of a format, for a tile of tokens of a kernel on
    an architecture, counted by `benchmarks.gpu_unpack`; of kernels that were not counted, those of
    the experts' gate and up, whose tiles are as theirs."""
    counted = table()["unpacking"]
    of_kernel = counted.get(kernel, counted["experts_gate_up_planes"])
    return float(_of_target(of_kernel[format], target))


def _of_target(section: Mapping[str, Any], target: str) -> Any:
    return section[target] if target in section else section[table()["like"][target]]


def _tile(entry: Mapping[str, int]) -> Tile:
    constants = {name: value for name, value in entry.items() if name.isupper()}
    return Tile(constants, entry["warps"], entry["stages"])


@cache
def measured(kernel: str, device: torch.device) -> dict[str, Tile]:
    """The fastest tiles of a kernel by their use, on a device of a product that was measured."""
    return {
        use: _tile(entry)
        for use, entry in _measured_product(device).get("tiles", {}).get(kernel, {}).items()
    }


def _measured_product(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return dict(table()["measured"].get(torch.cuda.get_device_name(device), {}))


def tile_for(kernel: str, device: torch.device, use: str = ANY) -> Tile:
    """The tile of a kernel that serves on a device."""
    target = architecture(device)
    assert target is not None, f"{device}: kernels have no tiles for it"
    first = candidates(kernel, target)[use][0]
    return measured(kernel, device).get(use, first)


@cache
def library(device: torch.device) -> frozenset[tuple[int, int]]:
    """The outputs and inputs of products with floats that the vendor's library makes faster on this
    device than kernels do, by the table."""
    shapes = _measured_product(device).get("library", ())
    return frozenset((outputs, inputs) for outputs, inputs in shapes)


def slower(operation: str, device: torch.device) -> bool:
    """Whether the table says that torch serves this operation faster on this device."""
    return operation in _measured_product(device).get("slower", ())
