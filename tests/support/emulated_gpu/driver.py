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
from sfumato.ops.triton.planes import ALIGNMENT

SHARED = 65_536  # bytes of a work group
_PAGE = 256  # a round address


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
        attributes = source.attrs.items()
        self._aligned = {
            at for (at, *_), each in attributes if ["tt.divisibility", ALIGNMENT] in each
        }
        self._threads, self._shared = metadata.num_warps * WAVE, metadata.shared

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any,
        enter: Callable[..., None] | None, leave: Callable[..., None] | None, *arguments: Any,
    ) -> None:  # fmt: skip
        code, grid = EmulatedDriver.utils.codes[function - 1], (x, y, z)
        tensors = {
            at: arguments[at]
            for at, kind in self._kinds
            if kind.startswith("*") and arguments[at] is not None
        }
        moved: dict[int, _Moved] = {}
        # Those first whose alignment the compiler knows.
        for at in sorted(tensors, key=lambda at: at not in self._aligned):
            start = tensors[at].untyped_storage().data_ptr()
            if start not in moved:
                shift = ALIGNMENT if at in self._aligned else tensors[at].element_size()
                moved[start] = _Moved(tensors[at], shift)
        values = [
            moved[tensors[at].untyped_storage().data_ptr()].address(tensors[at])
            if at in tensors
            else arguments[at] or 0
            for at, _ in self._kinds
        ]
        raw = code.packed([kind for _, kind in self._kinds], values, grid, self._threads)
        spans = [each.span for each in moved.values()]
        run(code, raw, grid, self._threads, self._shared, spans)
        for each in moved.values():
            each.give_back()


class _Moved:
    """The memory of a tensor, and of what shares it, for a launch: at an address that divides by
    what the compiler was told, and by no more."""

    def __init__(self, tensor: torch.Tensor, shift: int) -> None:
        storage = tensor.untyped_storage()
        self._original = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory = torch.empty(len(self._original) + 2 * _PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _PAGE + shift
        self._copy = memory[start : start + len(self._original)]
        self._copy.copy_(self._original)

    @property
    def span(self) -> tuple[int, int]:
        """Its addresses from, to."""
        return self._copy.data_ptr(), self._copy.data_ptr() + len(self._copy)

    def address(self, tensor: torch.Tensor) -> int:
        return self._copy.data_ptr() + tensor.data_ptr() - self._original.data_ptr()

    def give_back(self) -> None:
        """Takes over what the launch wrote; weights may stand in a file that cannot be written."""
        if not torch.equal(self._original, self._copy):
            self._original.copy_(self._copy)


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
