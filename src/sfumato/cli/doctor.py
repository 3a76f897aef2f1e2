"""`sfumato doctor`: what this machine has, what would run on it, and roughly how fast."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from sfumato import __version__, ops
from sfumato.cli import machine
from sfumato.cli.units import size, table
from sfumato.model.placement import SMALL, pick_device
from sfumato.weights.blocks import BLOCK_FORMATS, QuantizedTensor

# One denoising step of DiffusionGemma 26B-A4B with its canvas of 256 positions. Multiply-adds for
# each position: 25 sliding and 5 full layers with 8 of 128 experts (3.1e9), and the tied embedding
# twice, as head and as soft embedding (1.5e9). So many positions reach nearly every expert, so that
# a step reads all weights once; their size is that of the published Q4_K_M file. Without compiled
# operations all that a step reaches is dequantized: the layers (25e9 weights) once, the embedding
# (0.74e9) up to three times: for the cutoffs of top-k and top-p, the statistics, and the draw.
# Compiled ones multiply the blocks; only the soft embedding dequantizes, and multiplies floats.
STEP_FLOP = 2 * 256 * (3.1e9 + 1.5e9)
STEP_BYTES = 16.8e9
STEP_WEIGHTS = 25e9 + 3 * 0.74e9
EXPERTS_FLOP = 2 * 256 * 1.4e9
EXPERT_ROWS = 256 * 8 // 128  # positions that an expert has on average
EMBEDDING = 0.74e9
SLOW_S = 0.05
EXPERT = (1408, 2816)  # one expert's larger matrix: what is dequantized, or multiplied, in one go


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
        "backend": ops.backend,
        "backend_reason": ops.reason,
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
    """Speed of matrix products, in operations per second, of reading memory, in bytes, and of
    dequantizing, in weights; and, with compiled operations, of products with blocks of Q4_K, for
    a whole canvas and for an expert's share of it."""
    side = 768 if device.type == "cpu" else 4096
    found: dict[str, Any] = {"device": str(device)}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        seconds = _best(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        found[f"{_name(dtype)}_flops"] = 2 * side**3 / seconds
    source = torch.ones(1 << 26, device=device)
    found["read_bytes"] = source.nbytes / _best(source.sum, device)
    q4_k, (rows, columns) = BLOCK_FORMATS["Q4_K"], EXPERT
    data = torch.zeros(rows, columns // q4_k.block_size * q4_k.block_bytes, dtype=torch.uint8)
    expert = QuantizedTensor(data, q4_k, EXPERT).to(device)
    dtype = _quantized_dtype(device.type)
    seconds = _best(lambda: expert.dequantize(dtype), device)
    found["dequantized_weights"] = rows * columns / seconds
    if device.type == "cpu" and ops.backend.startswith("compiled"):
        packed = ops.pack(expert, "int8")
        for key, positions in (("int8_flops", 256), ("int8_expert_flops", EXPERT_ROWS)):
            x = torch.randn(positions, columns)
            seconds = _best(lambda x=x: ops.linear(x, packed), device)  # type: ignore[misc]
            found[key] = 2 * positions * rows * columns / seconds
    return found


def _quantized_dtype(device_type: str) -> torch.dtype:
    """What quantized models compute in, when nobody says (see `pick_dtype`)."""
    return torch.float32 if device_type == "cpu" else torch.bfloat16


def _dtypes(device: str) -> str:
    """What models compute in on that device, when nobody says, and why (see `pick_dtype`)."""
    small = f" and those under {size(SMALL)} (as fast there, and more exact)"
    return (
        f"{_name(_quantized_dtype(device))} for quantized models{small if device == 'cpu' else ''}"
        ", else as stored (but float16 as bfloat16, for its range)"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few runs, or of the second where they are slow."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    runs = 5 if timed() < SLOW_S else 1
    return min(timed() for _ in range(runs))


def estimate(speed: dict[str, Any]) -> dict[str, Any]:
    """What one step of the 26B-A4B would take, in milliseconds, and the least that any program
    would need: the greater of its arithmetic at the better speed, and reading its weights once."""
    floats = speed[f"{_name(_quantized_dtype(speed['device']))}_flops"]
    if "int8_flops" in speed:
        soft = 2 * 256 * EMBEDDING
        dequantizing = EMBEDDING / speed["dequantized_weights"]
        products = (STEP_FLOP - EXPERTS_FLOP - soft) / speed["int8_flops"]
        products += EXPERTS_FLOP / speed["int8_expert_flops"]
        arithmetic = max(products, STEP_BYTES / speed["read_bytes"]) + soft / floats
    else:
        dequantizing = STEP_WEIGHTS / speed["dequantized_weights"]
        arithmetic = STEP_FLOP / floats
    flops = max(rate for key, rate in speed.items() if key.endswith("_flops"))
    bound = max(STEP_FLOP / flops, STEP_BYTES / speed["read_bytes"])
    return {
        "model": "DiffusionGemma 26B-A4B, Q4_K_M",
        "ms_per_step": (dequantizing + arithmetic) * 1000,
        "dequantizing_ms": dequantizing * 1000,
        "arithmetic_ms": arithmetic * 1000,
        "bound_ms": bound * 1000,
    }


def _compiled_speed(speed: dict[str, Any]) -> str:
    if "int8_flops" not in speed:
        return ""
    return (
        f", {speed['int8_flops'] / 1e9:.0f} GFLOP/s with Q4_K itself and "
        f"{speed['int8_expert_flops'] / 1e9:.0f} with an expert's {EXPERT_ROWS} positions (int8)"
    )


def _dequantized(speed: dict[str, Any]) -> str:
    """What of the weights a step dequantizes."""
    return "the soft embedding's weights" if "int8_flops" in speed else "the weights"


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
        ("runs", f"on {found['runs_on']}; --dtype auto: {_dtypes(found['runs_on'])}"),
        ("backend", f"on a CPU {found['backend']}: {found['backend_reason']}"),
        ("compilers", "; ".join(found["compilers"].values()) or "none"),
        (
            "measured",
            f"on {speed['device']}: {speed['float32_flops'] / 1e9:.0f} GFLOP/s in float32, "
            f"{speed['bfloat16_flops'] / 1e9:.0f} in bfloat16, "
            f"{size(speed['read_bytes'])}/s of memory, "
            f"{speed['dequantized_weights'] / 1e9:.2g}e9 weights/s dequantized from Q4_K"
            + _compiled_speed(speed),
        ),
        (
            "estimate",
            f"{step['model']}: {step['ms_per_step']:,.0f} ms per step, of which "
            f"{step['dequantizing_ms']:,.0f} dequantize {_dequantized(speed)} and "
            f"{step['arithmetic_ms']:,.0f} compute (from the speeds above, not a measurement)",
        ),
        (
            "bound",
            f"{step['bound_ms']:,.0f} ms per step for a program that computes on the quantized "
            "weights (a roofline of the speeds above)",
        ),
    ]
    return table(rows, indent="")
