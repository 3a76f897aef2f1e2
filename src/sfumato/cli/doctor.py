"""`sfumato doctor`: does DiffusionGemma 26B-A4B fit, in which format, at how many seconds a step.

The verdict first, then the formats; `--verbose` adds what the machine has and what was measured.
"""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import torch

from sfumato import __version__, catalog, ops
from sfumato.api import EMBEDDED
from sfumato.bench import environment
from sfumato.cli.probes import (
    Measured,
    dtype_name,
    least_seconds,
    measure,
    quantized_dtype,
    step_seconds,
)
from sfumato.cli.terminal import print_report, size, table, wrapped
from sfumato.device_trial import try_device
from sfumato.engine.memory.device_memory import (
    Budget,
    accelerators,
    available_memory,
    budget,
    memory_limit,
    total_memory,
)
from sfumato.model.placement import SMALL, pick_device
from sfumato.ops.gpu import device_memory
from sfumato.ops.paths import paths
from sfumato.ops.registry import has_twins
from sfumato.ops.triton.planes import LAYOUTS

WHOLE = 0.9  # of a core: a probe that had as much was not delayed


def main(args: argparse.Namespace) -> int:
    """Measure for a few seconds, and print."""
    findings = facts(tests=args.verbose)
    rows = [("format", "memory", "fits", "a step")]
    for each in findings["formats"]:
        rows.append((each["format"], size(each["memory"]), each["fits"], seconds(each["step_s"])))
    lines = [*verdict(findings), "", *table(rows), *notes(findings)]
    # An indented line is a row of a table, or a command to copy.
    lines = [line if line.startswith(" ") else wrapped(line) for line in lines]
    if args.verbose:
        served = [(o["operation"], f"{o['path']}: {o['reason']}") for o in findings["operations"]]
        lines += ["", *_named(detail(findings))]
        lines += ["", *_named([("operation", "served by, and why"), *served])]
    print_report(args.json, findings, lines)
    return 0


def facts(tests: bool = False) -> dict[str, Any]:
    """All facts of the report as plain values: sizes in bytes, speeds in units a second. tests:
    whether operations are tested first on a device that needs it, as loading a model does."""
    device, cores = pick_device(), environment.usable_cores()
    free_memory = budget(device)
    total = device_memory(device)
    limit = memory_limit() if device.type == "cpu" else None
    measured = measure(device, cores)
    usable = min((n for n in (total, limit) if n is not None), default=None)
    formats = entries(measured, free_memory, usable)
    return {
        "sfumato": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {
            "name": environment.cpu_name(),
            "features": environment.cpu_features(),
            "cores": cores,
            "torch_threads": torch.get_num_threads(),
        },
        "memory": {
            "total": total_memory(),
            "available": available_memory(),
            "cgroup_limit": memory_limit(),
        },
        "disk_free": environment.free_disk(),
        "devices": [vars(each) for each in accelerators()],  # those too that torch cannot use
        "runs_on": str(device),
        "backend": ops.backend,
        "backend_reason": ops.reason,
        "operations": operations(device, tests),
        "compilers": environment.compilers(),
        "speed": {"device": measured.device, **measured.speed},
        "rounds": measured.rounds,
        "busy": {"is": measured.busy, "load": measured.load, "share": measured.share},
        "budget": free_memory and {"bytes": free_memory.nbytes, "source": free_memory.source},
        "usable": usable,
        "formats": formats,
        "best": best(formats),
        "least_s": least_seconds(measured.speed, catalog.PUBLISHED[0].nbytes),
    }


def operations(device: torch.device, tests: bool) -> list[dict[str, str]]:
    """Each operation, who serves it on a device, and why."""
    if tests and not has_twins(device):
        try_device(device, EMBEDDED)
    elif tests:
        ops.prepare(device, formats=frozenset(LAYOUTS))
    return [vars(path) for path in paths(device)]


def entries(
    measured: Measured, free_memory: Budget | None, usable: int | None
) -> list[dict[str, Any]]:
    """Each published format: whether it fits, and a step's time."""
    return [
        {
            "format": entry.format,
            "name": entry.name,
            "download": entry.nbytes,
            "memory": entry.memory,
            "fits": fits(entry.memory, free_memory, usable),
            "step_s": step_seconds(measured.speed, measured.device, entry.format, entry.nbytes),
        }
        for entry in catalog.PUBLISHED
    ]


def fits(need: float, free_memory: Budget | None, usable: int | None) -> str:
    """ "yes"; "not now" where other programs hold what it needs; "no"; or "unknown"."""
    if free_memory is None:
        return "unknown"
    if need <= free_memory.nbytes:
        return "yes"
    return "not now" if usable is not None and need <= usable else "no"


def best(formats: list[dict[str, Any]]) -> str | None:
    """The format to begin with, the smallest that fits; None: none does."""
    return next((each["format"] for each in formats if each["fits"] in ("yes", "unknown")), None)


def verdict(findings: dict[str, Any]) -> list[str]:
    """Whether the model fits and how fast it is, in two or three sentences."""
    smallest, budget = findings["formats"][0], findings["budget"]
    place = "this CPU" if findings["runs_on"] == "cpu" else findings["runs_on"]
    taken = next((f for f in findings["formats"] if f["format"] == findings["best"]), None)
    if taken is None:
        free = f"{size(budget['bytes'])} of memory are free" if budget else "too little is free"
        now = " now, while other programs hold memory" if smallest["fits"] == "not now" else ""
        return [
            f"{catalog.MODEL} does not fit{now}: {smallest['format']}, the smallest, "
            f"needs {size(smallest['memory'])}, and {free} on {place}.",
            "`sfumato demo` shows the small model that is part of this package.",
        ]
    step = taken["step_s"]
    low, high = (seconds(count * step) for count in catalog.STEPS)
    lines = [
        f"{catalog.MODEL} fits: take {taken['format']}, about {seconds(step)} a step on {place}.",
        f"A text of 256 tokens takes {catalog.STEPS[0]} to {catalog.STEPS[1]} steps: {low} to "
        f"{high}.",
    ]
    if taken["fits"] == "unknown":
        lines.append(f"It needs {size(taken['memory'])}; what is free cannot be found out here.")
    return lines


def notes(findings: dict[str, Any]) -> list[str]:
    """Where the figures come from, and the next command."""
    lines, busy = [""], findings["busy"]
    for unused in (each for each in findings["devices"] if each["problem"]):
        lines.append(f"{unused['name']} is not used: {unused['problem']}.")
    if busy["is"]:
        cores = findings["cpu"]["cores"]
        why = [f"load {busy['load']:.1f} on {cores} cores"] if busy["load"] else []
        if busy["share"] < WHOLE:
            why.append(f"a probe got {busy['share']:.0%} of a core")
        lines.append(
            f"This machine is busy ({', and '.join(why)}). The times "
            "are estimates for idle cores, less certain than usual; now a step takes longer. Run "
            "doctor again when the other work is done."
        )
    else:
        lines.append("The times are estimates from short probes of this machine.")
    threads, cores = findings["cpu"]["torch_threads"], findings["cpu"]["cores"]
    if findings["runs_on"] == "cpu" and threads < cores:
        limit = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch"
        lines.append(f"They are for {threads} of {cores} cores, to which {limit} limits threads.")
    if findings["best"] is not None:
        taken = next(f for f in findings["formats"] if f["format"] == findings["best"])
        disk = f"; {size(free)} of disk are free" if (free := findings["disk_free"]) else ""
        lines.append(f"Get it ({size(taken['download'])}{disk}):")
        lines.append(f"  sfumato pull {taken['name']}")
    return lines


def seconds(value: float) -> str:
    """Two significant digits, as an estimate has: 0.37 s, 8.1 s, 94 s, 6.5 min."""
    if value < 99.5:
        return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 570 else f"{value / 60:.0f} min"


def detail(findings: dict[str, Any]) -> list[tuple[str, str]]:
    """What the machine has, and what was measured, for people."""
    cpu, speed = findings["cpu"], findings["speed"]
    memory = (f"{k.replace('_', ' ')} {size(v)}" for k, v in findings["memory"].items() if v)
    return [
        (
            "sfumato",
            f"{findings['sfumato']}, Python {findings['python']}, torch {findings['torch']}",
        ),
        ("platform", findings["platform"]),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} threads in torch"),
        ("features", " ".join(cpu["features"]) or "unknown"),
        ("memory", ", ".join(memory)),
        ("accelerators", "; ".join(map(_accelerator, findings["devices"])) or "none"),
        ("runs", f"on {findings['runs_on']}; --dtype auto: {_dtypes(findings['runs_on'])}"),
        ("backend", f"on a CPU {findings['backend']}: {findings['backend_reason']}"),
        ("compilers", "; ".join(findings["compilers"].values()) or "none"),
        ("measured", f"on {speed['device']}, medians of {findings['rounds']}: {_speeds(speed)}"),
        (
            "bound",
            f"{seconds(findings['least_s'])} a step of {findings['formats'][0]['format']} for any "
            "program (the better of these rates for all of its arithmetic, or reading its weights)",
        ),
    ]


def _named(rows: list[tuple[str, str]]) -> list[str]:
    """Names and texts in two columns, in lines of the terminal's width."""
    indent = 2 + max(len(name) for name, _ in rows)
    return [wrapped(text, f"{name:<{indent}}", " " * indent) for name, text in rows]


def _accelerator(device: dict[str, Any]) -> str:
    """A device in a few words."""
    parts = [f"{device['device'] or 'not in torch'}: {device['name']} ({device['source']})"]
    parts += [f"{size(device['free'])} free"] if device["free"] else []
    return ", ".join(parts + ["the machine's memory"] * device["shares_host_memory"])


def _speeds(speed: dict[str, Any]) -> str:
    flops = [
        f"{rate / 1e9:.0f} GFLOP/s {_PROBES.get(name, name.removesuffix('_flops'))}"
        for name, rate in speed.items()
        if name.endswith("_flops")
    ]
    return ", ".join(
        [
            *flops,
            f"{size(speed['read_bytes'])}/s of memory",
            f"{speed['dequantized_weights'] / 1e9:.2g}e9 weights/s dequantized from Q4_K",
        ]
    )


_PROBES = {
    "float32_flops": "in float32",
    "bfloat16_flops": "in bfloat16",
    "expert_flops": "with an expert's few positions",
    "Q4_K_flops": "with packed Q4_K",
}


def _dtypes(device: str) -> str:
    """What models compute in on that device, where no option says, and why (see `pick_dtype`)."""
    if device != "cpu" and quantized_dtype(device) == torch.float32:
        return (
            "float32 for all models, or float16 where that is faster and holds their numbers, "
            "since the device has no units for bfloat16"
        )
    small = f" and those under {size(SMALL)} (as fast there, and more exact)"
    return (
        f"{dtype_name(quantized_dtype(device))} for quantized models"
        f"{small if device == 'cpu' else ''}, else as stored (but float16 as bfloat16, for its "
        "range)"
    )
