"""Which accelerators this machine has, as torch, NVIDIA's NVML and amdgpu's sysfs report them.

Torch alone knows what it can use, and the drivers know what else there is: a device that torch does
not see is listed with the reason.  NVML is asked where the package `nvidia-ml-py` is installed.
The memory of a chip that a CPU and a GPU share is counted once, as the machine's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.model.placement import shares_host_memory
from sfumato.model.torch_code import INSTALL, missing_code

DRM = Path("/sys/class/drm")
_AMD = "0x1002"
_OF_A_CHIP = (2, 3)  # revisions of amdgpu's metrics that GPUs on a CPU's chip have


@dataclass(frozen=True)
class Accelerator:
    """One device. Bytes are None where no source gives them."""

    name: str
    source: str  # which of them reported it: "torch", "NVML" or "amdgpu"
    device: str | None  # torch's name of it; None: torch does not see it
    memory: int | None
    free: int | None
    shares_host_memory: bool = False
    problem: str | None = None  # why torch cannot use it


def accelerators(drm: Path = DRM) -> list[Accelerator]:
    """Those that torch sees first; each device once."""
    seen = [*_of_torch()]
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    amd = torch.cuda.is_available() and torch.version.hip is not None
    # A driver's list and torch's have no common names: where torch sees devices of a vendor, those
    # that it does not see were hidden from it on purpose.
    others = [*([] if nvidia else _of_nvml()), *([] if amd else _of_amdgpu(drm))]
    return seen + others


def _of_torch() -> Iterator[Accelerator]:
    # With a driver that is too old torch counts devices, and can ask nothing of them.
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield _of_cuda(torch.device("cuda", index))
    if torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            properties = torch.xpu.get_device_properties(index)
            memory = properties.total_memory
            yield Accelerator(properties.name, "torch", f"xpu:{index}", memory, None)
    if torch.backends.mps.is_available():
        yield Accelerator("Apple GPU", "torch", "mps", None, None, True)


def _of_cuda(device: torch.device) -> Accelerator:
    """A device that fails is listed too, with what it answers."""
    name, shares = str(device), False
    problem: str | None = None
    free: int | None = None
    memory: int | None = None
    try:
        name = torch.cuda.get_device_name(device)
        problem, shares = missing_code(device), shares_host_memory(device)
        free, memory = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        failure = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        problem = problem or f"it fails: {failure}"
    return Accelerator(name, "torch", str(device), memory, free, shares, problem)


def _of_nvml() -> Iterator[Accelerator]:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver: each raises an error of its own
        return
    if torch.version.cuda is None:
        problem = f"torch {torch.__version__} is built without CUDA; install one with it: {INSTALL}"
    else:
        problem = (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: the driver is "
            "too old, or CUDA_VISIBLE_DEVICES hides it"
        )
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, memory = nvml.nvmlDeviceGetName(handle), None
            with contextlib.suppress(nvml.NVMLError):  # a chip without memory of its own has none
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield Accelerator(
                name.decode() if isinstance(name, bytes) else name,
                *("NVML", None, memory and memory.total, memory and memory.free, memory is None),
                problem,
            )
    except nvml.NVMLError:
        return
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _of_amdgpu(drm: Path) -> Iterator[Accelerator]:
    """Devices of the kernel's driver: one folder each, beside those of its connectors."""
    problem = f"torch {torch.__version__} is built without ROCm; install one with it: {INSTALL}"
    for card in sorted(drm.glob("card[0-9]*/device/mem_info_vram_total")):
        folder = card.parent
        own, used = (_number(folder / f"mem_info_vram_{which}") for which in ("total", "used"))
        if _text(folder / "vendor") != _AMD or own is None:
            continue
        free = None if used is None else max(0, own - used)
        shares = _is_of_a_chip(folder)
        if shares:  # what it was given at the start, and what it may take of the machine's memory
            more, taken = (_number(folder / f"mem_info_gtt_{which}") for which in ("total", "used"))
            own += more or 0
            free = None if free is None else free + max(0, (more or 0) - (taken or 0))
        name = _text(folder / "product_name") or f"AMD GPU {_text(folder / 'device')}"
        yield Accelerator(name, "amdgpu", None, own, free, shares, problem)


def _is_of_a_chip(folder: Path) -> bool:
    """Whether a GPU is part of a CPU's chip: the header of its metrics says so in its third byte,
    after two bytes of size."""
    try:
        with (folder / "gpu_metrics").open("rb") as stream:
            header = stream.read(4)
    except OSError:
        return False
    return len(header) == 4 and header[2] in _OF_A_CHIP


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
