"""What is asked of a GPU that torch drives by its backend `cuda`: NVIDIA's, and by ROCm AMD's.

The rest of the program asks here, so that it names no vendor, and another backend has one place to
be added.  Knows neither kernels nor graphs.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from threading import get_ident

import torch

KIND = "cuda"
"""The kind of device, as torch names it and twins are registered for it."""


def is_gpu(device: torch.device) -> bool:
    """Whether a device is such a GPU, of this machine or of one that is only computed for."""
    return device.type == KIND


def is_present(device: torch.device) -> bool:
    """Whether a device is such a GPU, and torch sees one here."""
    return is_gpu(device) and torch.cuda.is_available()


def product(device: torch.device) -> str | None:
    """The name under which a GPU is sold; None for other devices."""
    return torch.cuda.get_device_name(device) if is_gpu(device) else None


def is_integrated(device: torch.device) -> bool:
    """Whether a GPU that is present has no memory of its own."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


@cache
def widest_float(kind: str) -> torch.dtype:
    """float64, or float32 where a kind of device has no such numbers, as Apple's GPUs and some of
    Intel's: probed once."""
    if kind not in ("cpu", "meta", KIND):
        try:
            torch.ones(2, dtype=torch.float64, device=kind).cumsum(0).cpu()
        except (RuntimeError, TypeError, AssertionError):
            return torch.float32
    return torch.float64


def side_stream(main: torch.Stream | torch.cuda.Stream) -> torch.Stream:
    """A second stream of the device, for work beside what this thread gives to `main`: the same one
    each time, and that of no other stream or thread, as long as a process makes no more than the 32
    streams of a device that torch hands out in turn. Torch may make a stream at its first use,
    which should be before a capture."""
    return _side_stream(main.device, main.stream_id, get_ident())


@cache
def _side_stream(device: torch.device, main: int, thread: int) -> torch.Stream:
    return torch.Stream(device)


def peak_bytes() -> int | None:
    """The most that torch has held of the current GPU; None where this process uses none."""
    return torch.cuda.max_memory_reserved() if _used() else None


def used_bytes() -> int | None:
    """Bytes of the current GPU that are in use now, those of the driver and of other processes too;
    None where this process uses none."""
    if not _used():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def _used() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a CUDA device, or of this machine for others; None where the system
    does not report it."""
    if is_gpu(device):
        return total_memory(device)
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
