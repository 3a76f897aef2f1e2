"""What the model of the step says of a benchmark: beside what is measured on a known device, or in
its place for a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.table import Table

from sfumato.bench.metrics import Values
from sfumato.bench.report import number
from sfumato.bench.step_model.device_limits import DeviceLimits, limits_of_product
from sfumato.bench.step_model.kernel_cost import Products
from sfumato.bench.step_model.prediction import StepTime, step_time
from sfumato.bench.step_model.step_cost import StepShape, codes_of, step_costs
from sfumato.model.loading import expected_shapes
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.ops import gpu

_COLUMNS = ("kernel", "launches", "GB", "TFLOP", "floor, ms", "predicted, ms", "bound by")


def network_bytes(network: Network) -> dict[str, int]:
    """Bytes of each loaded tensor, by canonical name."""
    return {name: tensor.nbytes for name, tensor in _tensors(network)}


def network_codes(network: Network) -> dict[str, Products]:
    """What multiplies each loaded tensor that is codes, by canonical name."""
    formats = ((name, getattr(tensor, "kind", "")) for name, tensor in _tensors(network))
    return codes_of(dict(formats))


def _tensors(network: Network) -> Iterator[tuple[str, Any]]:
    for name in expected_shapes(network.config):
        path, _, leaf = name.rpartition(".")
        yield name, getattr(network.transformer.get_submodule(path), leaf)


def beside_measured(network: Network, shape: StepShape) -> Values:
    """The floor and the predicted time of a step, by metric; nothing where the device's limits are
    not known."""
    product = gpu.product(network.device)
    limits = None if product is None else limits_of_product(product)
    if limits is None:
        return {}
    held, codes = network_bytes(network), network_codes(network)
    time = step_time(step_costs(network.config, shape, held, codes=codes), limits)
    return {"step_floor_ms": [time.floor_ms], "step_predicted_ms": [time.predicted_ms]}


def predicted_steps(
    config: ModelConfig,
    stored: Mapping[str, int],
    limits: DeviceLimits,
    shapes: Sequence[StepShape],
    codes: Mapping[str, Products] = MappingProxyType({}),
) -> list[tuple[StepShape, StepTime]]:
    """The steps of these shapes on a device; stored: bytes of each tensor; codes: see
    `step_costs`."""
    costs = [(shape, step_costs(config, shape, stored, codes=codes)) for shape in shapes]
    return [(shape, step_time(kernels, limits)) for shape, kernels in costs]


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
