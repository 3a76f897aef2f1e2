"""Times, poisoned memory and ceilings of a device, for `gpu_first.py`. On a CPU clocks stand in for
events, so that all of it runs where no device is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sfumato.bench.step_cost import DeviceLimits, limits_of_product

Run = Callable[[], object]

CALLS = 10  # of a captured graph, so that its launch counts for little
WARM_UP = 3


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def median_ms(
    runs: Sequence[Run], device: torch.device, seconds: float, least: int = 5
) -> dict[str, Any]:
    """The median time of one run: runs in turns, so that no cache holds the last one's input.

    On a CUDA device by events, in a graph of `CALLS` runs where they can be captured. Ends after
    about `seconds`, with at least `least` times.
    """
    for index in range(max(WARM_UP, len(runs))):
        runs[index % len(runs)]()
    synchronize(device)
    how, times = "clock", []
    measure: Callable[[], float]
    if device.type == "cuda":
        graph = _graph(runs)
        how = "graph" if graph is not None else "events"

        def measure() -> float:
            if graph is not None:
                return _event_ms(graph.replay) / CALLS
            return _event_ms(runs[len(times) % len(runs)])
    else:

        def measure() -> float:
            began = time.perf_counter()
            runs[len(times) % len(runs)]()
            synchronize(device)
            return 1e3 * (time.perf_counter() - began)

    began = time.perf_counter()
    while len(times) < least or (time.perf_counter() - began < seconds and len(times) < 200):
        times.append(measure())
    return {"median_ms": statistics.median(times), "least_ms": min(times), "runs": len(times),
            "timed_by": how}  # fmt: skip


def _event_ms(run: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _graph(runs: Sequence[Run]) -> Any:
    """A graph of `CALLS` runs in turns; None where they cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for index in range(CALLS):
                runs[index % len(runs)]()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def poison(device: torch.device, outputs: Sequence[Tensor], copies: int = 4) -> None:
    """Fills memory that the allocator will give out next with NaN, or with -1 where integers are
    expected: what a kernel does not write shows."""
    blocks = [torch.empty_like(out) for out in outputs for _ in range(copies)]
    for block in blocks:
        block.fill_(float("nan") if block.is_floating_point() else -1)
    synchronize(device)
    del blocks


def device_limits(device: torch.device, side: int, nbytes: int) -> DeviceLimits:
    """The ceilings of a device, measured here: a copy of `nbytes` and products of random matrices
    of `side`."""
    copying = median_ms([_copy(nbytes, device)], device, 0.5)["median_ms"]
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        multiplying = median_ms([_product(a, b)], device, 0.5)["median_ms"]
        rates.append(2.0 * side**3 / multiplying * 1e3)
    name, cache, memory, known = "this cpu", 32e6, 0.0, None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, float(properties.total_memory)
        known = limits_of_product(name)
        cache = float(getattr(properties, "L2_cache_size", known.cache if known else 32e6))
    bandwidth = 2 * nbytes / copying * 1e3
    bf16, float32 = rates
    codes = (known.fp8_flops, known.int8_flops) if known else (bf16, bf16)
    fp8, int8 = (bf16 * rate / (known.bf16_flops if known else bf16) for rate in codes)
    source = "measured by gpu_first.py; FP8 and INT8 from bfloat16, in the table's ratio"
    return DeviceLimits(name, bandwidth, bf16, fp8, int8, float32, cache, memory, True, source)


def _copy(nbytes: int, device: torch.device) -> Run:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(a: Tensor, b: Tensor) -> Run:
    return lambda: a @ b


def launch_gap_s(device: torch.device) -> float:
    """Seconds between two small kernels of a graph."""
    x = torch.zeros(1024, device=device)
    return float(median_ms([lambda: x.add_(1)], device, 0.2)["median_ms"]) / 1e3
