"""The device and the dtype of a checkpoint, where the user names none."""

from __future__ import annotations

import logging

import torch

from sfumato import ops
from sfumato.model.fast_dtype import faster_dtype
from sfumato.model.torch_code import missing_code, multiplies_bfloat16
from sfumato.ops import gpu
from sfumato.ops.narrow_cache import CACHED, FORMATS, FP8, Q8_0, is_narrow
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import float_dtype, is_float

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_TYPES = {"bf16": torch.bfloat16, "fp8": FP8, "q8_0": Q8_0}
SMALL = 100 << 20  # bytes of tensors; see `pick_dtype`


def pick_device(name: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is the accelerator, where there is one that torch has
    code for.

    Raises ValueError for a device that this machine does not have, or that torch has no code for.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or (problem := missing_code(accelerator)) is None:
            return accelerator or torch.device("cpu")
        _log.warning("device: %s is left out: %s", accelerator, problem)
        return torch.device("cpu")
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
    take bfloat16 alone, and of a cache also 8 bits."""
    if dtype != torch.bfloat16 or (cache_dtype != dtype and not is_narrow(cache_dtype)):
        return frozenset()
    known = ops.kernels_on(device)
    if not is_narrow(cache_dtype):
        return known
    narrow = {name for name in CACHED if f"{name} {FORMATS[cache_dtype]}" in known}
    return known - CACHED | narrow


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
        if device.type == "mps" and stored == FP8:
            raise Refused(
                "cache_type", f"'fp8' is a kind of number that {device} does not have", "use q8_0"
            )
        if device.type != "cpu" and not is_narrow(stored) and stored != dtype:
            raise Refused(
                "cache_type",
                f"{cache_type!r} goes with activations of that dtype on {device}, and these are "
                f"in {str(dtype).removeprefix('torch.')}",
                "leave the argument out",
            )
        return stored
    quantized = any(not is_float(info.format) for info in checkpoint.tensors.values())
    return torch.bfloat16 if quantized and ops.multiplies_bf16(device) else dtype
