"""Milliseconds of a step on a device: the floor, and a prediction of what kernels reach.

The floor of a kernel is the larger of its stored bytes at the device's bandwidth and its products
at the rate of their kind, those in float32 at bfloat16's.  No program is faster.  The prediction
allows a kernel `REACHED` of both rates, counts the bytes that kernels pass where they exceed the
device's cache, and counts each launch.  `REACHED` and `LAUNCH_S` are assumptions until a device
confirms or corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.bench.step_model.device_limits import DeviceLimits
from sfumato.bench.step_model.kernel_cost import KernelCost

REACHED = 0.85
"""Of both rates, what a kernel reaches whose tiles fit its matrices. Assumed."""
LAUNCH_S = 1.5e-6
"""Seconds between two kernels of a graph: the end of one and the start of the next. Assumed."""
CACHE_SPEED = 2.5
"""How much faster than its memory a device's last cache is. Assumed."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel on a device."""

    cost: KernelCost
    floor_s: float
    predicted_s: float
    bound: str  # "memory", "arithmetic" or "launch": what the prediction is mostly made of

    def as_dict(self) -> dict[str, Any]:
        """Plain values, times in ms."""
        cost = self.cost
        return {
            "kernel": cost.name,
            "part": cost.part,
            "products": cost.products,
            "launches": cost.launches,
            "gigabytes": cost.stored / 1e9,
            "gigaflop": cost.flop / 1e9,
            "floor_ms": self.floor_s * 1e3,
            "predicted_ms": self.predicted_s * 1e3,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class StepTime:
    """A step on a device."""

    device: DeviceLimits
    kernels: tuple[KernelTime, ...]

    @property
    def floor_ms(self) -> float:
        return 1e3 * sum(kernel.floor_s for kernel in self.kernels)

    @property
    def predicted_ms(self) -> float:
        return 1e3 * sum(kernel.predicted_s for kernel in self.kernels)

    @property
    def outside_ms(self) -> float:
        """Predicted, of everything outside the layers."""
        outside = (k.predicted_s for k in self.kernels if k.cost.part == "outside")
        return 1e3 * sum(outside)


def step_time(costs: Sequence[KernelCost], device: DeviceLimits) -> StepTime:
    """The floor and the prediction of each kernel."""
    return StepTime(device, tuple(_kernel_time(cost, device) for cost in costs))


def _kernel_time(cost: KernelCost, device: DeviceLimits) -> KernelTime:
    coded = {"FP8": device.fp8_flops, "INT8": device.int8_flops}
    fastest = coded.get(cost.products, device.bf16_flops)
    floor = max(cost.stored / device.bytes_per_s, cost.flop / fastest)
    rate = device.float32_flops if cost.products == "float32" else fastest
    each = cost.passed / max(1, cost.launches)  # by one launch
    speed = device.bytes_per_s * (CACHE_SPEED if each <= device.cache else 1.0)
    read = (cost.stored + cost.again) / device.bytes_per_s
    moving = (read + cost.passed / speed) / REACHED
    computing = cost.flop / rate / REACHED
    launching = cost.launches * LAUNCH_S
    predicted = max(moving, computing) + launching
    parts = {"memory": moving, "arithmetic": computing, "launch": launching}
    return KernelTime(cost, floor, predicted, max(parts, key=parts.__getitem__))
