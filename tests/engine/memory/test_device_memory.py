"""Memory that is there, by several tellers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sfumato.engine.memory import device_memory as module
from sfumato.engine.memory.device_memory import Budget, budget, host_budgets

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def least(root: Path) -> Budget:
    return min(host_budgets(root / "proc", root / "cgroup"), key=lambda bound: bound.nbytes)


def test_the_tightest_bound_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    assert least(tmp_path) == Budget(8 * GIB, "memory available on this machine")
    write(tmp_path / "cgroup/a/memory.max", f"{4 * GIB}\n")
    write(tmp_path / "cgroup/a/memory.current", f"{3 * GIB}\n")
    result = least(tmp_path)
    assert result.nbytes == GIB
    assert "control group limit of 4,294,967,296 bytes" in result.source
    assert "a/memory.max" in result.source


def test_cached_files_make_room(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/memory.max", f"{4 * GIB}\n")
    write(tmp_path / "cgroup/memory.current", f"{3 * GIB}\n")
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n"
    write(tmp_path / "cgroup/memory.stat", stat)
    assert least(tmp_path).nbytes == 5 * GIB // 2


def test_old_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,memory:/job\n1:name=systemd:/\n")
    folder = tmp_path / "cgroup/memory"
    write(folder / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(folder / "job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(folder / "job/memory.usage_in_bytes", f"{GIB}\n")
    write(folder / "job/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n")
    assert least(tmp_path).nbytes == 3 * GIB // 2


def test_more_used_than_allowed_is_no_room(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/memory.max", "5\n")
    write(tmp_path / "cgroup/memory.current", "7\n")
    assert least(tmp_path).nbytes == 0


def test_a_system_that_tells_its_size_alone(tmp_path: Path) -> None:
    (result,) = host_budgets(tmp_path, tmp_path) or [None]
    assert result is None or result.source == "memory of this machine"


def test_this_machine() -> None:
    result = budget(torch.device("cpu"))
    assert result is None or result.nbytes > 0


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize(("hip", "kind"), [(None, "CUDA"), ("6.2", "ROCm")])
def test_cuda(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, kind: str, integrated: bool
) -> None:
    """What torch holds without using it is free; the host's memory counts where it is the same."""
    monkeypatch.setattr(module, "shares_host_memory", lambda device: integrated)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    monkeypatch.setattr(module, "host_budgets", lambda: [Budget(1, "host")])
    own = Budget(6 * GIB, f"free memory of cuda:1 ({kind})")
    assert budget(torch.device("cuda:1")) == (Budget(1, "host") if integrated else own)


@pytest.mark.parametrize("tells", [False, True])
def test_xpu(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    def info(device: torch.device) -> tuple[int, int]:
        if not tells:
            raise RuntimeError("not supported by this driver")
        return 5 * GIB, 8 * GIB

    class Properties:
        total_memory = 8 * GIB

    monkeypatch.setattr(torch.xpu, "mem_get_info", info)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda device: GIB)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Properties)
    assert budget(torch.device("xpu")) == Budget((6 if tells else 7) * GIB, "free memory of xpu")


@pytest.mark.parametrize("host", [2 * GIB, 20 * GIB])
def test_a_gpu_that_shares_the_machines_memory(monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(module, "host_budgets", lambda: [Budget(host, "host")])
    result = budget(torch.device("mps"))
    assert result and result.nbytes == min(host, 7 * GIB)
