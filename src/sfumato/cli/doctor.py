"""`sfumato doctor`: what this machine has, what would run on it, and roughly how fast."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from sfumato import __version__
from sfumato.cli import machine
from sfumato.cli.units import size, table
from sfumato.model.placement import pick_device

# One denoising step of DiffusionGemma 26B-A4B with its canvas of 256 positions. Multiply-adds for
# each position: 25 sliding and 5 full layers with 8 of 128 experts (3.1e9), and the tied embedding
# twice, as head and as soft embedding (1.5e9). So many positions reach nearly every expert, so that
# a step reads all weights once; their size is that of the published Q4_K_M file.
STEP_FLOP = 2 * 256 * (3.1e9 + 1.5e9)
STEP_BYTES = 16.8e9


def main(args: argparse.Namespace) -> int:
    """Measure for about a second, and print."""
    found = facts()
    print(json.dumps(found, indent=2) if args.json else "\n".join(report(found)))
    return 0


def facts() -> dict[str, Any]:
    """Everything that is told, as plain values: sizes in bytes, speeds in units per second."""
    device = pick_device()
    speed = measure(device)
    return {
        "sfumato": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {
            "name": machine.cpu_name(),
            "features": machine.cpu_features(),
            "cores": machine.usable_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "memory": {
            "total": machine.total_memory(),
            "available": machine.available_memory(),
            "cgroup_limit": machine.memory_limit(),
        },
        "devices": devices(),
        "runs_on": str(device),
        "compilers": machine.compilers(),
        "speed": speed,
        "estimate": estimate(speed),
    }


def devices() -> list[dict[str, Any]]:
    """Accelerators that torch can use; none is not an error."""
    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append({"device": f"cuda:{index}", "name": name, "memory": total, "free": free})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "memory": None, "free": None})
    return found


def measure(device: torch.device) -> dict[str, Any]:
    """Speed of matrix products, in operations per second, and of reading memory, in bytes."""
    side = 768 if device.type == "cpu" else 4096
    found: dict[str, Any] = {"device": str(device)}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        seconds = _best(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        found[f"{str(dtype).removeprefix('torch.')}_flops"] = 2 * side**3 / seconds
    source = torch.ones(1 << 26, device=device)
    found["read_bytes"] = source.nbytes / _best(source.sum, device)
    return found


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few runs."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()
    return min(timed() for _ in range(5))


def estimate(speed: dict[str, Any]) -> dict[str, Any]:
    """The least time that one step of the 26B-A4B could take, in milliseconds.

    The greater of its arithmetic at the measured speed, and reading its weights once.
    """
    flops = max(speed["float32_flops"], speed["bfloat16_flops"])
    seconds = max(STEP_FLOP / flops, STEP_BYTES / speed["read_bytes"])
    return {"model": "DiffusionGemma 26B-A4B, Q4_K_M", "ms_per_step": seconds * 1000}


def report(found: dict[str, Any]) -> list[str]:
    """The facts as lines for people."""
    cpu, memory, speed = found["cpu"], found["memory"], found["speed"]
    step = found["estimate"]
    accelerators = [
        f"{d['device']}: {d['name']}" + (f", {size(d['free'])} free" if d["free"] else "")
        for d in found["devices"]
    ]
    rows = [
        ("sfumato", f"{found['sfumato']}, Python {found['python']}, torch {found['torch']}"),
        ("platform", found["platform"]),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} threads in torch"),
        ("features", " ".join(cpu["features"]) or "unknown"),
        ("memory", ", ".join(f"{k.replace('_', ' ')} {size(v)}" for k, v in memory.items() if v)),
        ("accelerators", "; ".join(accelerators) or "none that torch can use"),
        (
            "runs",
            f"on {found['runs_on']}; quantized models compute in "
            f"{'float32' if found['runs_on'] == 'cpu' else 'bfloat16'}, others as they are stored",
        ),
        ("compilers", "; ".join(found["compilers"].values()) or "none"),
        (
            "measured",
            f"on {speed['device']}: {speed['float32_flops'] / 1e9:.0f} GFLOP/s in float32, "
            f"{speed['bfloat16_flops'] / 1e9:.0f} in bfloat16, "
            f"{size(speed['read_bytes'])}/s of memory",
        ),
        (
            "estimate",
            f"{step['model']}: {step['ms_per_step']:,.0f} ms per step at best "
            "(an estimate from the speeds above, not a measurement)",
        ),
    ]
    return table(rows, indent="")
