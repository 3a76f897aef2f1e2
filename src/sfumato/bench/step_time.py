"""Milliseconds of a step on a device: the floor, and a prediction of what kernels reach.

The floor of a kernel is the larger of its stored bytes at the device's bandwidth and its products
at the rate of their kind, those in float32 at bfloat16's.  No program is faster.  The prediction
allows a kernel `REACHED` of both rates, counts the bytes that kernels pass where they exceed the
device's cache, and counts each launch.  `REACHED` and `LAUNCH_S` are assumptions until a device
confirms or corrects them.

What devices can do at most is measured or published.  No program reaches a published rate: of one,
a device is taken to reach the same share as a large copy and a large product reached on the one
device where both are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from sfumato.bench.report import Values, number
from sfumato.bench.step_cost import KernelCost, StepShape, codes_of, step_costs
from sfumato.model.loading import expected_shapes
from sfumato.model.network import Network
from sfumato.ops import gpu
from sfumato.refused import Refused

COPY_SHARE, PRODUCT_SHARE = 0.90, 0.80
"""Shares of the published rates that a large copy (4.3 of 4.8 TB/s) and a large bfloat16 product of
random numbers (788 of 990 TFLOP/s) reached on an H200 with torch 2.11."""
CODES_SHARE = 0.71
"""Share of the published rates of products of codes: 1,400 of 1,979 TFLOP/s on an H200. Assumed,
for no device has been measured."""


@dataclass(frozen=True)
class DeviceLimits:
    """The highest rates of a device, as large copies and products reach them."""

    name: str
    bytes_per_s: float  # a copy in the device's memory, bytes read and bytes written counted
    bf16_flops: float  # a dense bfloat16 product that adds in float32
    fp8_flops: float  # of e4m3 codes; that of bfloat16 where kernels widen them for want of units
    int8_flops: float
    float32_flops: float  # outside of the units for products of bfloat16 and of tf32
    cache: float  # bytes of the last cache before the device's memory
    memory: float  # bytes
    measured: bool  # on such a device; False: from published rates
    source: str

    @classmethod
    def published(
        cls,
        name: str,
        terabytes: float,
        bf16: float,
        codes: tuple[float, float],
        float32: float,
        cache_mb: float,
        gigabytes: float,
        source: str,
    ) -> DeviceLimits:
        """From a data sheet: TB/s, TFLOP/s without sparsity, MB of cache, GB of memory. codes:
        TFLOP/s of FP8, sums in float32, and of INT8; 0 where these are no faster."""
        products = bf16 * 1e12 * PRODUCT_SHARE
        fp8, int8 = (max(products, rate * 1e12 * CODES_SHARE) for rate in codes)
        return cls(
            name,
            terabytes * 1e12 * COPY_SHARE,
            products,
            fp8,
            int8,
            float32 * 1e12 * PRODUCT_SHARE,
            cache_mb * 1e6,
            gigabytes * 1e9,
            False,
            source,
        )


_published = DeviceLimits.published
_SHEET = "data sheet"
_LIMITS = (
    DeviceLimits(
        "h200", 4.3e12, 790e12, 1400e12, 1400e12, 0.8 * 67e12, 60e6, 150.7e9, True,
        "copy of 8.6 GB and a product of side 8192 of random numbers, torch 2.11, driver 580; "
        "float32 from the data sheet, FP8 and INT8 assumed",
    ),
    _published("h100", 3.35, 990, (1979, 1979), 67, 50, 85.9, f"{_SHEET}, SXM"),
    _published("b200", 8.0, 2250, (4500, 4500), 75, 126, 192, f"{_SHEET}, SXM"),
    _published("a100", 2.04, 312, (0, 624), 19.5, 40, 85.9, f"{_SHEET}, SXM 80 GB"),
    _published("l4", 0.30, 121, (242, 242), 30.3, 48, 24, _SHEET),
    _published(
        "rtx-pro-6000", 1.79, 503.8, (1007.6, 1007.6), 126, 128, 103,
        f"{_SHEET}, Blackwell, workstation",
    ),
    _published("rtx-5090", 1.79, 209.5, (419, 838), 104.8, 96, 34.2, _SHEET),
    _published("rtx-4090", 1.01, 165.2, (330.3, 660.6), 82.6, 72, 25.8, _SHEET),
    _published("rtx-3090", 0.936, 71, (0, 284), 35.6, 6, 25.8, _SHEET),
    _published("rtx-3060", 0.36, 25.5, (0, 102), 12.7, 3, 12.9, f"{_SHEET}, 12 GB"),
    _published("arc-b70", 0.608, 183.5, (0, 367), 22.9, 32, 34.4, f"{_SHEET}; half of int8"),
    _published("strix-halo", 0.256, 59.4, (0, 0), 14.8, 32, 103, f"{_SHEET}, 96 GB for the GPU"),
    _published("mi300x", 5.3, 1307, (0, 2615), 163.4, 256, 206, _SHEET),
)  # fmt: skip
LIMITS = {limits.name: limits for limits in _LIMITS}
"""The devices that are known by name."""


def limits_named(name: str) -> DeviceLimits:
    """Raises ValueError, naming the known ones, for another name."""
    if name not in LIMITS:
        raise Refused("predict", f"{name!r} is none of {', '.join(LIMITS)}")
    return LIMITS[name]


def limits_of_product(product: str) -> DeviceLimits | None:
    """The limits of a device by the name that its driver gives ("NVIDIA H200"); None: unknown.

    A product whose name says more than the table's does (as "H100 PCIe") is another one.
    """
    plain = {"nvidia", "amd", "geforce", "instinct", "hbm3", "sxm", "80gb", "sxm4", "blackwell"}
    plain |= {"workstation", "edition", "oam"}
    words = [word for word in product.lower().replace("-", " ").split() if word not in plain]
    return LIMITS.get("-".join(words))


REACHED = 0.85
"""Share of both rates that a kernel reaches whose tiles fit its matrices. Assumed."""
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


_COLUMNS = ("kernel", "launches", "GB", "TFLOP", "floor, ms", "predicted, ms", "bound by")


def network_bytes(network: Network) -> dict[str, int]:
    """Bytes of each loaded tensor, by canonical name."""
    return {name: tensor.nbytes for name, tensor in _tensors(network).items()}


def _tensors(network: Network) -> dict[str, Any]:
    tensors = {}
    for name in expected_shapes(network.config):
        path, _, leaf = name.rpartition(".")
        tensors[name] = getattr(network.transformer.get_submodule(path), leaf)
    return tensors


def beside_measured(network: Network, shape: StepShape) -> Values:
    """The floor and the predicted time of a step, by metric; nothing where the device's limits are
    not known."""
    product = gpu.product(network.device)
    limits = None if product is None else limits_of_product(product)
    if limits is None:
        return {}
    kinds = {name: getattr(tensor, "kind", "") for name, tensor in _tensors(network).items()}
    held, codes = network_bytes(network), codes_of(kinds)
    time = step_time(step_costs(network.config, shape, held, codes=codes), limits)
    return {"step_floor_ms": [time.floor_ms], "step_predicted_ms": [time.predicted_ms]}


def to_document(steps: Sequence[tuple[StepShape, StepTime]], nbytes: int) -> dict[str, Any]:
    """Plain values, of a device's steps. nbytes: of all weights."""
    device = steps[0][1].device
    return {
        "benchmark": "sfumato bench --predict",
        "device": device.name,
        "measured_limits": device.measured,
        "limits": device.source,
        "weights_bytes": nbytes,
        "fits": nbytes < device.memory,
        "steps": [
            {
                "rows": shape.rows,
                "width": shape.width,
                "prefix": shape.prefix,
                "floor_ms": time.floor_ms,
                "predicted_ms": time.predicted_ms,
                "kernels": [kernel.as_dict() for kernel in time.kernels],
            }
            for shape, time in steps
        ],
    }


def to_tables(steps: Sequence[tuple[StepShape, StepTime]]) -> Iterator[Table]:
    """A table of kernels for each step."""
    for shape, time in steps:
        title = f"{time.device.name}: {shape.rows} x {shape.width} positions, prefix "
        table = Table(title=f"{title}{shape.prefix:,}; nothing was run", title_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("kernel", "bound by") else "right")
        for kernel in time.kernels:
            cost = kernel.cost
            table.add_row(
                *(cost.name, number(cost.launches), number(cost.stored / 1e9)),
                *(number(cost.flop / 1e12), number(1e3 * kernel.floor_s)),
                *(number(1e3 * kernel.predicted_s), kernel.bound),
            )
        table.add_section()
        launches = sum(kernel.cost.launches for kernel in time.kernels)
        stored = sum(kernel.cost.stored for kernel in time.kernels)
        flop = sum(kernel.cost.flop for kernel in time.kernels)
        table.add_row(
            *("a step", number(launches), number(stored / 1e9), number(flop / 1e12)),
            *(number(time.floor_ms), number(time.predicted_ms), ""),
        )
        yield table
