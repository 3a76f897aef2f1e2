"""The conditions of a figure: versions, commit, processor, compilers, and memory in use.

Knows no model.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sfumato import __version__, ops
from sfumato.bench.report import Values
from sfumato.ops import gpu

_PACKAGE = Path(__file__).resolve().parents[1]
_STATUS, _CPU = Path("/proc/self/status"), Path("/proc/cpuinfo")
INTERVAL_S = 0.05
# The instructions that make quantized and bfloat16 arithmetic fast, as /proc/cpuinfo names them.
_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def environment() -> dict[str, Any]:
    """Plain values; the commit is None where the package is not in a checkout of its own."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sfumato": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "backend": ops.backend,
        "backend_reason": ops.reason,
    }


def commit(package: Path = _PACKAGE) -> str | None:
    """The checkout's commit, with "-dirty" where files differ from it; None outside of one."""
    # Installed into an environment that lies within another project's checkout, the commit found
    # would be that project's.
    if _git(package, "rev-parse", "--show-prefix") != "src/sfumato/":
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    done = _run("git", "-C", str(folder), *arguments)
    return done.stdout.strip() or None if done and done.returncode == 0 else None


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    """The ended run of a program with its output; None where it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None


class PeakMemory:
    """Watches while it is entered."""

    def __init__(self, status: Path = _STATUS) -> None:
        self._status = status
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def values(self) -> Values:
        """The peaks so far, in bytes, by metric."""
        self._sample()
        values: Values = {key: [float(peak)] for key, peak in self._peaks.items()}
        if (peak := gpu.peak_bytes()) is not None:
            values["peak_device"] = [float(peak)]
        return values

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        for key, count in (resident(self._status) | device_in_use()).items():
            self._peaks[key] = max(count, self._peaks.get(key, 0))


def device_in_use() -> dict[str, int]:
    """Bytes of a CUDA device that are in use now, by metric: those of the driver, of graphs and of
    other processes too. Nothing where this process uses no device."""
    used = gpu.used_bytes()
    return {} if used is None else {"peak_device_used": used}


def resident(status: Path = _STATUS) -> dict[str, int]:
    """Bytes of this process that are in memory now (for `peak_resident`: at most so far), by
    metric; nothing where the system has no figure."""
    entries = _entries(status)
    names = ("RssAnon", "RssShmem", "RssFile", "VmHWM")
    if not set(names) <= entries.keys():
        return {}
    anonymous, shared, mapped, most = (int(entries[name].split()[0]) * 1024 for name in names)
    return {
        "peak_anonymous": anonymous + shared,
        "peak_mapped": mapped,
        "peak_resident": most,
    }


def _entries(path: Path) -> dict[str, str]:
    """The lines "name: value" of a file of the system; none where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    return _entries(_CPU).get("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets of the processor, as far as they matter here."""
    entries = _entries(_CPU)
    flags = (entries.get("flags") or entries.get("Features", "")).split()
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
    """The version that each compiler that is found prints, by command."""
    return {name: _version(name) for name in ("c++", "clang++", "nvcc") if shutil.which(name)}


def _version(name: str) -> str:
    """The first line of the output that has a version number in it."""
    done = _run(name, "--version")
    if done is None:
        return "does not run"
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.strip() for line in lines if re.search(r"\d\.\d", line)), "unknown")
