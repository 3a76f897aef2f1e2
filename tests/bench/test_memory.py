from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch

from sfumato.bench.environment import INTERVAL_S, PeakMemory, device_in_use, resident

linux = pytest.mark.skipif(not resident(), reason="only Linux tells the memory of a process")
SIZE = 64 << 20


@linux
def test_the_peak_stays_when_the_memory_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    before = resident()
    with PeakMemory() as memory:
        own = torch.ones(SIZE // 4)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for start in range(0, SIZE, mmap.PAGESIZE):
            mapped[start]
        time.sleep(4 * INTERVAL_S)
        mapped.close()
        del own
    peaks = memory.values()
    for key in ("peak_anonymous", "peak_mapped"):
        assert 0.9 * SIZE < peaks[key][0] - before[key] < 2 * SIZE
    assert resident()["peak_mapped"] < peaks["peak_mapped"][0] - SIZE / 2
    assert peaks["peak_resident"] >= [max(peaks["peak_anonymous"] + peaks["peak_mapped"])]


def test_nothing_is_guessed_where_the_system_does_not_tell(tmp_path: Path) -> None:
    with PeakMemory(tmp_path / "none") as memory:
        pass
    assert set(memory.values()) <= {"peak_device", "peak_device_used"}
    odd = tmp_path / "status"
    odd.write_text("Name:\tpython\nVmHWM:\t12 kB\n")
    assert resident(odd) == {}


def test_the_memory_of_a_device_counts_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_in_use() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    assert device_in_use() == {"peak_device_used": 7}
