"""How much memory there is for us: of a device, of this machine, of the control groups we are in;
and which accelerators the machine has.

Of several bounds the tightest counts, and names its source. Sources are CUDA and ROCm (torch's
`cuda`), XPU, MPS, Linux's control groups of both versions, and the system's own figure. Vulkan,
DXGI and Sysman are not used: all memory is taken through torch, which knows none of them.

Torch alone knows which accelerators it can use, and the drivers (NVIDIA's NVML, where the package
`nvidia-ml-py` is installed, and amdgpu's sysfs) know what else there is: a device that torch does
not see is listed with the reason. The memory of a chip that a CPU and a GPU share is counted once,
as the machine's. Knows no models.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.model.placement import INSTALL, missing_code, shares_host_memory
from sfumato.ops.gpu import device_memory

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # what control groups of version 1 say when they mean none


_WITH_ALLOCATOR = "cuda", "xpu"
"""Kinds of devices whose memory torch takes in advance."""


@dataclass(frozen=True)
class Budget:
    """Bytes that can still be taken, and who says so."""

    nbytes: int
    source: str


def budget(device: torch.device) -> Budget | None:
    """The tightest bound on what can be taken on a device; for a CPU, and for a GPU that shares
    its memory, the machine's count too. None where it is unknown."""
    bounds = [] if device.type == "cpu" else [*_of_device(device)]
    if shares_host_memory(device):
        bounds += host_budgets()
    return min(bounds, key=lambda bound: bound.nbytes, default=None)


def host_budgets(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Budget]:
    """Every bound on this machine's memory."""
    bounds = [
        Budget(max(0, limit - used), f"control group limit of {limit:,} bytes in {file}")
        for limit, used, file in _groups(proc, cgroups)
    ]
    free = available_memory(proc)
    if free is not None:
        return [*bounds, Budget(free, "memory available on this machine")]
    total = device_memory(torch.device("cpu"))
    return bounds if total is None else [*bounds, Budget(total, "memory of this machine")]


def available_memory(proc: Path = PROC) -> int | None:
    """Bytes that a new program could use now, or None where it is unknown."""
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The tightest memory limit, in bytes, of the control groups that this process is in."""
    return min((limit for limit, _, _ in _groups(proc, cgroups)), default=None)


def _of_device(device: torch.device) -> Iterator[Budget]:
    """What torch holds of a device's memory and does not use counts as free."""
    name = str(device)
    if device.type in _WITH_ALLOCATOR:
        torch_of = getattr(torch, device.type)
        reserved = torch_of.memory_reserved(device)
        try:
            free, _ = torch_of.mem_get_info(device)
        except RuntimeError:  # not every driver supports it
            free = torch_of.get_device_properties(device).total_memory - reserved
        spare = reserved - torch_of.memory_allocated(device)
        kind = f" ({'ROCm' if torch.version.hip else 'CUDA'})" if device.type == "cuda" else ""
        yield Budget(free + spare, f"free memory of {name}{kind}")
    elif device.type == "mps":
        left = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
        yield Budget(max(0, left), "working set that the system recommends for its GPU")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int, Path]]:
    """Limit, use, and the limit's file of each control group that has one. Cached files are not
    counted as used: they make room."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = cgroups, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        folder = top / group.lstrip("/")
        # A parent's limit holds as well; within a container only the top may be visible.
        for place in (folder, *folder.parents):
            limit = _read(place / names[0])
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                used = _read(place / names[1])
                cached = _cached(place / "memory.stat", names[2])
                left = max(0, int(used) - cached) if used.isdecimal() else 0
                yield int(limit), left, place / names[0]
            if place == top:
                break


def _cached(stat: Path, prefix: str) -> int:
    wanted = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in _read(stat).splitlines())
    return sum(int(value) for key, value in pairs if key in wanted)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def used_memory(device: torch.device, proc: Path = PROC) -> int | None:
    """Bytes that this process holds: of a GPU what torch has taken, else what is resident. None
    where it is unknown."""
    if device.type in _WITH_ALLOCATOR:
        reserved: int = getattr(torch, device.type).memory_reserved(device)
        return reserved
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        pages = (proc / "self" / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


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
    """The accelerators, those that torch sees first before the others; each device once."""
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
        if _read(folder / "vendor") != _AMD or own is None:
            continue
        free = None if used is None else max(0, own - used)
        shares = _is_of_a_chip(folder)
        if shares:  # what it was given at the start, and what it may take of the machine's memory
            more, taken = (_number(folder / f"mem_info_gtt_{which}") for which in ("total", "used"))
            own += more or 0
            free = None if free is None else free + max(0, (more or 0) - (taken or 0))
        name = (
            _read(folder / "product_name").strip() or f"AMD GPU {_read(folder / 'device').strip()}"
        )
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
    text = _read(path)
    return int(text) if text.isdecimal() and len(text) < 20 else None
