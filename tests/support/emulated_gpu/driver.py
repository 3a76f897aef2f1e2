"""The driver by which Triton launches its kernels on the emulated device, on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.emulated_gpu import ARCHITECTURE, WAVE
from tests.support.emulated_gpu.code_object import CodeObject
from tests.support.emulated_gpu.machine import run
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sfumato.ops.triton import tiles

SHARED = 65_536  # bytes of a work group


class _Utils:
    def __init__(self) -> None:
        self.codes: list[CodeObject] = []

    def get_device_properties(self, device: int) -> dict[str, Any]:
        numbers = dict.fromkeys(("mem_bus_width", "mem_clock_rate", "sm_clock_rate"), 1)
        return numbers | {
            "max_shared_mem": SHARED, "warpSize": WAVE, "arch": ARCHITECTURE,
            "multiprocessor_count": 40, "max_num_regs": 65_536,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.codes.append(CodeObject(binary, name))
        number = len(self.codes)
        return number, number, 0, 0, 1024


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        kinds = enumerate(source.signature.values())
        self._kinds = [(at, kind) for at, kind in kinds if kind != "constexpr"]
        self._threads, self._shared = metadata.num_warps * WAVE, metadata.shared

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any,
        enter: Callable[..., None] | None, leave: Callable[..., None] | None, *arguments: Any,
    ) -> None:  # fmt: skip
        code, values, tensors = EmulatedDriver.utils.codes[function - 1], [], []
        for at, kind in self._kinds:
            value = arguments[at]
            if kind.startswith("*"):
                tensors += [] if value is None else [value]
                value = 0 if value is None else value.data_ptr()
            values.append(value)
        grid = (x, y, z)
        raw = code.packed([kind for _, kind in self._kinds], values, grid, self._threads)
        spans = [_span(tensor) for tensor in tensors]
        run(code, raw, grid, self._threads, self._shared, spans)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The memory of the tensor that a kernel got, of which it may have got a view."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class EmulatedDriver:
    """What Triton asks of a device."""

    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", ARCHITECTURE, WAVE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def activate() -> None:
    """Lets all kernels of this process run on the emulated device, with its tiles."""
    driver.set_active(EmulatedDriver())
    tiles.INTERPRETED = ARCHITECTURE
    tiles.architecture.cache_clear()
