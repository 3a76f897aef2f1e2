"""Whether this build of torch has code for a device: a wheel carries machine code for some only."""

from __future__ import annotations

import os
import re

import torch

INSTALL = "https://pytorch.org/get-started/locally"
LEGACY = (7, 5)
"""The compute capability from which every wheel with CUDA has code. Below, that is Maxwell, Pascal
and Volta, the wheels for CUDA 12.6 have it, which PyTorch builds up to torch 2.14 (its RELEASE.md,
and issue 190385)."""
_BUILT = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def missing_code(device: torch.device) -> str | None:
    """What is wrong and what to do, where torch's kernels cannot run on a CUDA or ROCm device; None
    where they can, or where this cannot be known."""
    if device.type != "cuda":
        return None
    built, properties = torch.cuda.get_arch_list(), torch.cuda.get_device_properties(device)
    if torch.version.hip:
        needed = properties.gcnArchName.partition(":")[0]
        # The variable makes the driver take the device for another one.
        if os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
            return None
        runs = needed in {name.partition(":")[0] for name in built}
    else:
        needed = f"sm_{properties.major}{properties.minor}"
        runs = any(serves(name, properties.major, properties.minor) for name in built)
    if runs or not built:
        return None
    build = "a build of torch that has it"
    if not torch.version.hip and (properties.major, properties.minor) < LEGACY:
        build = "torch 2.14 or earlier for CUDA 12.6, the last that has it"
    return (
        f"torch {torch.__version__} has no code for {properties.name} ({needed}), only for "
        f"{', '.join(built)}; install {build}, see {INSTALL}"
    )


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has units for products of bfloat16: of NVIDIA's those from Ampere on. A CPU
    counts as none, whatever its kernels do."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type != "cpu"  # a device of another machine is a new one
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def serves(built: str, major: int, minor: int) -> bool:
    """Whether code built for a name ("sm_90", "sm_90a", "compute_90", …) runs on a device of a
    compute capability.  Machine code runs on later devices of its major number, that of "a" on its
    own device alone; "compute" code is translated for every later device."""
    match = _BUILT.fullmatch(built)
    if match is None:
        return False
    kind, own = match[1], (int(match[2]), int(match[3]))
    if match[4] == "a":
        return own == (major, minor)
    return own <= (major, minor) and (kind == "compute" or own[0] == major)
