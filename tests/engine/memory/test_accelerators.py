"""Devices as each source reports them: torch, NVML, amdgpu's files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sfumato.engine.memory import device_memory as module
from sfumato.engine.memory.device_memory import Accelerator, accelerators

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sees no device, and NVML is not installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", None)


def card(drm: Path, name: str, **files: object) -> Path:
    folder = drm / name / "device"
    folder.mkdir(parents=True)
    for key, value in files.items():
        data = value if isinstance(value, bytes) else f"{value}\n".encode()
        (folder / key).write_bytes(data)
    return folder


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert accelerators(tmp_path) == accelerators(tmp_path / "none") == []


def test_amdgpu(tmp_path: Path) -> None:
    """A card with memory of its own; an APU, which shares the machine's; and another vendor's."""
    sizes = {"mem_info_vram_total": 16 * GIB, "mem_info_vram_used": GIB}
    borrowed = {"mem_info_gtt_total": 64 * GIB, "mem_info_gtt_used": 2 * GIB}
    revision = {kind: bytes([120, 0, number, 3]) for kind, number in (("card", 1), ("chip", 2))}
    card(tmp_path, "card0", vendor="0x1002", product_name="RX 9070", **sizes, **borrowed,
         gpu_metrics=revision["card"])  # fmt: skip
    card(tmp_path, "card1", vendor="0x1002", device="0x1586", **sizes, **borrowed,
         gpu_metrics=revision["chip"])  # fmt: skip
    card(tmp_path, "card2", vendor="0x8086", **sizes)
    card(tmp_path, "card3", vendor="0x1002", mem_info_vram_total="?")
    one, chip = accelerators(tmp_path)
    assert (one.name, one.memory, one.free) == ("RX 9070", 16 * GIB, 15 * GIB)
    assert (one.shares_host_memory, one.device, one.source) == (False, None, "amdgpu")
    assert one.problem and one.problem.startswith(f"torch {torch.__version__} is built without RO")
    assert (chip.name, chip.memory, chip.free) == ("AMD GPU 0x1586", 80 * GIB, 77 * GIB)
    assert chip.shares_host_memory


class NVMLError(Exception):
    pass


def nvml(count: int, memory: bool = True) -> SimpleNamespace:
    def info(handle: int) -> SimpleNamespace:
        if not memory:
            raise NVMLError
        return SimpleNamespace(total=8 * GIB, free=3 * GIB)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA X" if handle else "NVIDIA Y",
        nvmlDeviceGetMemoryInfo=info,
    )


def test_nvml_names_what_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    monkeypatch.setattr(torch.version, "cuda", None)
    first, second = accelerators(tmp_path)
    assert (first.name, second.name) == ("NVIDIA Y", "NVIDIA X")
    assert (first.memory, first.free, first.shares_host_memory) == (8 * GIB, 3 * GIB, False)
    assert first.problem and "is built without CUDA" in first.problem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in (accelerators(tmp_path)[0].problem or "")
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1, memory=False))
    (chip,) = accelerators(tmp_path)
    assert (chip.memory, chip.free, chip.shares_host_memory) == (None, None, True)


def test_a_device_that_torch_sees_is_listed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(module, "missing_code", lambda device: "no code")
    monkeypatch.setattr(module, "shares_host_memory", lambda device: False)
    expected = Accelerator("NVIDIA H200", "torch", "cuda:0", 8 * GIB, 5 * GIB, False, "no code")
    assert accelerators(tmp_path) == [expected]


def test_a_device_that_fails_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    monkeypatch.setattr(module, "missing_code", lambda device: "no code")
    monkeypatch.setattr(module, "shares_host_memory", lambda device: False)
    (listed,) = accelerators(tmp_path)
    assert (listed.memory, listed.free, listed.problem) == (None, None, "no code")
    monkeypatch.setattr(module, "missing_code", fails)
    (listed,) = accelerators(tmp_path)
    assert listed.problem == "it fails: no kernel image is available"


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch counts the device, by NVML, and raises whatever else it is asked."""

    def too_old(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("get_device_name", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, too_old)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (listed,) = accelerators(tmp_path)
    assert (listed.name, listed.source, listed.device) == ("NVIDIA Y", "NVML", None)
    assert "the driver is too old" in (listed.problem or "")


def test_other_vendors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arc = SimpleNamespace(name="Intel Arc B70", total_memory=24 * GIB)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: arc)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    xpu, apple = accelerators(tmp_path)
    assert (xpu.name, xpu.device, xpu.memory) == ("Intel Arc B70", "xpu:0", 24 * GIB)
    assert (apple.device, apple.shares_host_memory) == ("mps", True)
