"""The device and the dtype of a checkpoint, where the user names none.

A build of torch carries machine code for some devices only (`missing_code`).  Which dtype a device
multiplies faster is not known from here for NVIDIA's GPUs before Ampere, of which some multiply
float16 many times as fast as float32 and others at a sixty-fourth of it, nor for Apple's: there one
product is timed at load (`faster_dtype`).
"""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from sfumato import ops
from sfumato.ops import gpu
from sfumato.ops.narrow_cache import FP8, Q8_0
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import float_dtype, is_float

_log = logging.getLogger(__name__)

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


ROWS = 256
"""Tokens of the product: those of a canvas."""
ROUNDS = 5
WIDEST = 8192
"""The product's width is at most this: its operands then take a few hundred megabytes."""
FASTER = 0.9
"""The share of float32's time that a narrower dtype may take where it is chosen: less than that is
no gain beyond noise, and float32 is more exact."""

Clock = Callable[[], float]


@cache
def faster_dtype(
    device: torch.device, width: int, narrow: torch.dtype, clock: Clock = time.perf_counter
) -> torch.dtype:
    """float32 or `narrow`, whichever multiplies [256, width] by [width, width] faster on a device,
    by medians; float32 where the device refuses the other. Logged once for a device and a width."""
    names = [str(dtype).removeprefix("torch.") for dtype in (torch.float32, narrow)]
    size = min(width, WIDEST)
    try:
        products = [
            partial(
                torch.mm, *(torch.ones(n, size, dtype=dtype, device=device) for n in (ROWS, size))
            )
            for dtype in (torch.float32, narrow)
        ]
        wide_s, narrow_s = medians(products, device, clock, ROUNDS)
    except (RuntimeError, AssertionError) as error:  # no such product there, no memory, no driver
        reason = str(error).partition("\n")[0]
        _log.info("dtype: float32 on %s, since %s fails there (%s)", device, names[1], reason)
        return torch.float32
    chosen = narrow if narrow_s <= FASTER * wide_s else torch.float32
    _log.info(
        "dtype: %s on %s: a product of width %d takes %.2f ms in %s and %.2f ms in %s",
        *(str(chosen).removeprefix("torch."), device, width),
        *(wide_s * 1e3, names[0], narrow_s * 1e3, names[1]),
    )
    return chosen


def medians(
    works: Sequence[Callable[[], object]], device: torch.device, clock: Clock, rounds: int
) -> list[float]:
    """Median seconds of each piece of work on a device, one after another in each round; before
    them comes a round that is left aside, since it loads code and memory."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, seconds in zip(works, taken, strict=True):
            began = clock()
            work()
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)
            seconds.append(clock() - began)
    return [statistics.median(seconds[1:]) for seconds in taken]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_TYPES = {"bf16": torch.bfloat16, "fp8": FP8, "q8_0": Q8_0}
SMALL = 100 << 20  # bytes of tensors; see `pick_dtype`


def pick_device(name: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is the accelerator, where there is one that torch has
    code for, and "gpu" the accelerator, where there is one.

    Raises ValueError for a device that this machine does not have, or that torch has no code for.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or (problem := missing_code(accelerator)) is None:
            return accelerator or torch.device("cpu")
        _log.warning("device: %s is left out: %s", accelerator, problem)
        return torch.device("cpu")
    if name == "gpu":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            why = f"'gpu': torch {torch.__version__} sees none on this machine"
            raise Refused("device", why, f"name cpu, or see `sfumato doctor` and {INSTALL}")
        name = accelerator
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise Refused("device", f"{str(name)!r} cannot be used here ({reason})") from error
    if device.type == "meta":
        raise Refused("device", "'meta' holds no numbers", "use cpu or an accelerator")
    if problem := missing_code(device):
        raise Refused("device", f"{str(name)!r} cannot be used here ({problem})")
    return device


def shares_host_memory(device: torch.device) -> bool:
    """Whether what a device takes is the machine's memory: of a CPU, and of a GPU that has none of
    its own (an APU's, Apple's, that of a Grace chip)."""
    if gpu.is_present(device):  # or it is another machine's
        return gpu.is_integrated(device)
    return device.type in ("cpu", "mps")


def serving_kernels(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> frozenset[str]:
    """The operations that kernels serve on a device, where the form of the weights allows it: they
    take bfloat16 alone."""
    return ops.kernels_on(device) if dtype == cache_dtype == torch.bfloat16 else frozenset()


def pick_dtype(
    name: str | torch.dtype, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """The dtype of activations, cache and unquantized weights.

    "auto" is the embedding's stored dtype, with four exceptions. Quantized weights compute in
    bfloat16 on an accelerator, and in float32 on a CPU. Float16 becomes bfloat16: activations of
    this family can exceed what float16 holds. A GPU without units for bfloat16 computes in float16
    or float32, whichever a product of the model's width measures faster (`load` tries whether
    float16 holds the model's numbers), and Apple's quantized weights likewise in bfloat16 or
    float32. And a small checkpoint runs in float32 on a CPU, which is as fast there and more
    exact. Raises ValueError for another name.
    """
    name = str(name).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise Refused("dtype", f"{name!r} is none of auto, {', '.join(DTYPES)}")
    info = checkpoint.tensors.get("embed_tokens.weight")
    if info is None:
        return torch.float32  # any: loading will raise and name what is missing
    stored = float_dtype(info.format)
    if device.type != "cpu" and not multiplies_bfloat16(device):
        return faster_dtype(device, info.shape[-1], torch.float16)
    if stored is None and device.type == "mps":
        return faster_dtype(device, info.shape[-1], torch.bfloat16)
    if stored is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    small = sum(other.nbytes for other in checkpoint.tensors.values()) < SMALL
    if device.type == "cpu" and small:
        return torch.float32
    return torch.bfloat16 if stored == torch.float16 else stored


def cache_dtype(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    cache_type: str | None = None,
) -> torch.dtype:
    """The dtype of stored keys and values, for activations of `dtype`.

    Bfloat16 with quantized weights on a CPU that multiplies it: attention is twice as fast then, a
    slot takes half the memory, and products with such weights are rounded as coarsely anyway.

    cache_type: a name of CACHE_TYPES, or None for that rule. Raises ValueError for another name,
    and for one that the device or activations of `dtype` do not go with.
    """
    if cache_type is not None:
        if cache_type not in CACHE_TYPES:
            raise Refused("cache_type", f"{cache_type!r} is none of {', '.join(CACHE_TYPES)}")
        stored = CACHE_TYPES[cache_type]
        if device.type != "cpu" and stored != dtype:
            raise Refused(
                "cache_type",
                f"{cache_type!r} is not for {device}, where keys and values are stored as "
                f"activations are, here in {str(dtype).removeprefix('torch.')}",
                "leave the argument out, or use the device cpu",
            )
        return stored
    quantized = any(not is_float(info.format) for info in checkpoint.tensors.values())
    return torch.bfloat16 if quantized and ops.multiplies_bf16(device) else dtype
