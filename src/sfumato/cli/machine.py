"""What a machine has: processor and compilers; memory is in `engine/memory/device_memory.py`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from sfumato.engine.memory.device_memory import available_memory, memory_limit, total_memory

__all__ = [
    "available_memory",
    "compilers",
    "cpu_features",
    "cpu_name",
    "free_disk",
    "memory_limit",
    "total_memory",
    "usable_cores",
]

# The instructions that make quantized and bfloat16 arithmetic fast, as /proc/cpuinfo names them.
_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Of the instruction sets that matter here, those that the processor has."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in _FEATURES if name in flags]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk() -> int | None:
    """Bytes that are free where this user's files are, or None where that cannot be known."""
    home = Path(os.path.expanduser("~"))
    for place in (home, *home.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def compilers() -> dict[str, str]:
    """What each compiler says of its version, by command; nothing for those not found."""
    return {
        name: _version([name, "--version"])
        for name in ("c++", "clang++", "nvcc")
        if shutil.which(name)
    }


def _version(command: list[str]) -> str:
    """The first line of the output that has a version number in it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.strip() for line in lines if re.search(r"\d\.\d", line)), "unknown")


def _cpuinfo(key: str) -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
