"""What the process keeps of memory that it frees."""

from __future__ import annotations

import resource

import pytest
import torch

from sfumato.ops.cpu.allocator import keep_freed_memory


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_freed_buffers_cost_no_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if not keep_freed_memory():
        pytest.skip("not glibc")
    for _ in range(3):
        torch.ones(4 << 20)  # 16 MiB, of 4096 pages
    before = faults()
    for _ in range(5):
        torch.ones(4 << 20)
    assert faults() - before < 500


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed_memory()
