"""The GPUs that kernels are compiled for: architecture names and shared memory.

Knows no kernel, and needs neither Triton nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 166_912, False),
        Target("sm_89", "cuda", 89, 32, 101_376, False),
        Target("sm_90", "cuda", 90, 32, 232_448, True),
        Target("sm_100", "cuda", 100, 32, 232_448, True),
        Target("sm_120", "cuda", 120, 32, 101_376, True),
        Target("gfx942", "hip", "gfx942", 64, 65_536, False),
        Target("gfx1151", "hip", "gfx1151", 32, 65_536, False),
    )
}

INTERPRETED = "sm_90"
"""Whose tiles serve where kernels are interpreted."""

_SAME_TILES = {
    "sm_86": "sm_89",
    "sm_87": "sm_80",
    "sm_103": "sm_100",
    "sm_121": "sm_120",
    "gfx1150": "gfx1151",
}
"""Architectures with the shared memory and instructions of another."""


@cache
def architecture(device: torch.device) -> str | None:
    """The name of a device's architecture in TARGETS; None where no tiles fit the device.

    A CPU has that of the interpreter.
    """
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").split(":")[0]
    if torch.version.hip is None or not name:
        name = f"sm_{properties.major}{properties.minor}"
    name = _SAME_TILES.get(name, name)
    return name if name in TARGETS else None


def own_architecture(device: torch.device) -> int | str:
    """The architecture of a GPU itself, as Triton names it; `architecture` is that of its tiles."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels get matrices as tensor descriptors on a device; see `Target.copies`."""
    name = architecture(device)
    return name is not None and TARGETS[name].copies
