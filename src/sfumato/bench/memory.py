"""The largest memory of this process, private pages and those of mapped files apart.

Linux has both in /proc; elsewhere only a CUDA device's memory is known, and nothing is guessed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from sfumato.bench.metrics import Values
from sfumato.ops import gpu

INTERVAL_S = 0.05
_STATUS = Path("/proc/self/status")


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")
    }
    if len(sizes) < 4:
        return {}
    return {
        "peak_anonymous": sizes["RssAnon"] + sizes["RssShmem"],
        "peak_mapped": sizes["RssFile"],
        "peak_resident": sizes["VmHWM"],
    }
