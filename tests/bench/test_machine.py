from __future__ import annotations

from pathlib import Path

import torch

from sfumato.bench import environment
from sfumato.engine.memory import device_memory
from sfumato.ops import gpu


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(root: Path, group: str) -> int | None:
    write(root / "proc/self/cgroup", group)
    return device_memory.memory_limit(root / "proc", root / "cgroup")


def test_a_parents_limit_holds(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/a/memory.max", "5000\n")
    write(tmp_path / "cgroup/a/b/memory.max", "max\n")
    assert limit(tmp_path, "0::/a/b\n") == 5000


def test_the_limit_of_old_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/memory/job/memory.limit_in_bytes", "7000\n")
    write(tmp_path / "cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert limit(tmp_path, "5:cpu:/x\n4:memory:/job\n") == 7000


def test_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/memory.max", "max\n")
    assert limit(tmp_path, "0::/\n") is None
    assert device_memory.memory_limit(tmp_path / "nothing", tmp_path) is None


def test_this_machine() -> None:
    assert environment.cpu_name()
    assert environment.usable_cores() >= 1
    assert environment.free_disk()
    total, available = gpu.device_memory(torch.device("cpu")), device_memory.available_memory()
    assert total is None or available is None or 0 < available <= total
