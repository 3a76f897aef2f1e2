"""How much memory there is for us: of a device, of this machine, of the control groups we are in.

Of several bounds the tightest counts, and names its source. Sources are CUDA and ROCm (torch's
`cuda`), XPU, MPS, Linux's control groups of both versions, and the system's own figure. Vulkan,
DXGI and Sysman are not used: all memory is taken through torch, which knows none of them.
Knows no models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sfumato.model.placement import shares_host_memory

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # what control groups of version 1 say when they mean none


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
    total = total_memory()
    return bounds if total is None else [*bounds, Budget(total, "memory of this machine")]


def total_memory() -> int | None:
    """Physical memory in bytes, or None where it is unknown."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


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
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        kind = "ROCm" if torch.version.hip else "CUDA"
        yield Budget(free + spare, f"free memory of {name} ({kind})")
    elif device.type == "xpu":
        spare = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        try:
            free, _ = torch.xpu.mem_get_info(device)
        except RuntimeError:  # not every driver supports it
            free = torch.xpu.get_device_properties(device).total_memory
            free -= torch.xpu.memory_reserved(device)
        yield Budget(free + spare, f"free memory of {name}")
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
            limit = _read(place / names[0]).strip()
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                used = _read(place / names[1]).strip()
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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def used_memory(device: torch.device, proc: Path = Path("/proc")) -> int | None:
    """Bytes that this process holds: of a GPU what torch has taken, else what is resident. None
    where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "xpu":
        return torch.xpu.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        pages = (proc / "self" / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
