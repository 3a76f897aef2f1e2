"""`sfumato doctor`: do a small model and DiffusionGemma 26B-A4B fit, the latter in which format,
at how many seconds a step.

The verdict first, then the formats; `--verbose` adds what the machine has and what was measured.

Probes measure how fast the operations are that a denoising step consists of. Each runs in turn with
all others, several times over, and the median counts. How much of the time a thread had for itself
shows whether other programs use the machine.

What a step computes is the step model's (`bench/step_cost.py`). So many positions reach nearly
every expert, so that a step reads all weights once. Compiled operations multiply the blocks; only
the soft embedding dequantizes, and multiplies floats. Without them all that a step reaches is
dequantized: the layers once, the embedding up to three times: for the cutoffs of top-k and top-p,
the statistics, the draw.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from sfumato import __version__, catalog, ops
from sfumato.bench import environment
from sfumato.bench.step_cost import MATRICES, StepShape, step_costs, stored_bytes
from sfumato.bench.subject import random_checkpoint
from sfumato.catalog import EMBEDDED
from sfumato.cli.terminal import named, print_report, size, table, wrapped
from sfumato.device_trial import try_device
from sfumato.engine.memory.device_memory import (
    Budget,
    accelerators,
    available_memory,
    budget,
    memory_limit,
)
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.placement import SMALL, multiplies_bfloat16, pick_device
from sfumato.ops.gpu import device_memory
from sfumato.ops.paths import paths
from sfumato.ops.registry import has_twins
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.train.memory import adapter_size, step_memory
from sfumato.train.tune import Tuning
from sfumato.weights.formats import FORMATS, QuantizedTensor

EXPERT = (1408, 2816)  # one expert's larger matrix: what is dequantized, or multiplied, in one go
CANVAS = 256
EXPERT_ROWS = CANVAS * 8 // 128  # positions that an expert has on average
PACKED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")
"""Formats whose products are timed, where there are compiled operations for them."""

ROUNDS = 7
ENOUGH_S = 3.0  # no further round after so many seconds, but at least three
CALM = 0.8  # the share of its time that a thread has on an idle machine, at least
LOADED = 0.75  # processes that want to run, for each core: less is an idle machine
TOGETHER = 0.9  # of their speed alone, what several threads have together
READERS = 4  # threads that take all of the memory's bandwidth

LAYER_EXTRA = 1.5
"""What else a layer does (attention, norms, rounding activations), over its products alone, as
`bench --where` finds for layers of the real size; between 1.4 and 1.7 on two machines."""

_BASE = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "safetensors": "BF16"}

Speed = dict[str, float]
"""By the probe's name: operations, bytes or weights a second."""

WHOLE = 0.9  # of a core: a probe that had as much was not delayed


@dataclass(frozen=True)
class Measured:
    """What the probes found."""

    device: str
    speed: Speed  # medians, with all threads; of an idle machine, as far as that can be known
    rounds: int
    load: float | None  # processes that wanted to run in the minute before; None: not known
    share: float  # processor time over elapsed time of a run; 1 on an idle machine
    cores: int

    @property
    def busy(self) -> bool:
        loaded = self.load is not None and self.load > LOADED * self.cores
        return loaded or self.share < CALM


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
        lines += ["", *named(detail(findings))]
        lines += ["", *named([("operation", "served by, and why"), *served])]
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
    taken = best(formats)
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
            "total": device_memory(torch.device("cpu")),
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
        "best": taken and taken["format"],
        "small": small(free_memory, usable),
        "tuning": tuning(free_memory, usable),
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
            "memory": entry.needs(),
            "fits": fits(entry.needs(), free_memory, usable),
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


FITTING = ("yes", "unknown")


def best(formats: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The format to begin with, the smallest that fits; None: none does."""
    return next((each for each in formats if each["fits"] in FITTING), None)


def small(free_memory: Budget | None, usable: int | None) -> dict[str, Any] | None:
    """The small model to begin with, in the largest form that fits; None: none does."""
    entry = catalog.FIRST
    needs = {quantize: entry.needs(quantize) for quantize in (None, "q8_0", "q4_k")}
    fitting = ((q, n) for q, n in needs.items() if fits(n, free_memory, usable) in FITTING)
    if (chosen := next(fitting, None)) is None:
        return None
    return {"name": entry.name, "quantize": chosen[0], "memory": chosen[1]}


def tuning(free_memory: Budget | None, usable: int | None) -> dict[str, Any]:
    """The memory of tuning the smallest published format by an adapter, as `sfumato tune
    --recompute` does without other options, and whether it fits."""
    entry, how = catalog.PUBLISHED[0], Tuning(recompute=True)
    config = config_of(random_checkpoint("26b-a4b"))
    learned = adapter_size(config, how.targets, how.rank)
    sizes = round(entry.nbytes), learned, how.context, how.at_once
    memory = step_memory(config, *sizes, torch.bfloat16, how.recompute).total
    fitting = fits(memory, free_memory, usable)
    return {"format": entry.format, "tokens": how.context, "memory": memory, "fits": fitting}


def verdict(findings: dict[str, Any]) -> list[str]:
    """Which small model fits, and whether the large one does and how fast it is, in two to four
    sentences."""
    lines = []
    if (first := findings["small"]) is not None:
        option = f" --quantize {first['quantize']}" if first["quantize"] else ""
        need = size(first["memory"])
        lines = [
            f"{catalog.FIRST.title} fits ({catalog.FIRST.size} to download, {need} of memory):",
            f"  sfumato chat -m {first['name']}{option}",
        ]
    return lines + large_verdict(findings)


def large_verdict(findings: dict[str, Any]) -> list[str]:
    """Whether DiffusionGemma fits and how fast it is."""
    smallest, budget = findings["formats"][0], findings["budget"]
    place = "this CPU" if findings["runs_on"] == "cpu" else findings["runs_on"]
    if (taken := best(findings["formats"])) is None:
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


_FITS = {"yes": "fits", "not now": "does not fit now", "no": "does not fit", "unknown": "may fit"}


def notes(findings: dict[str, Any]) -> list[str]:
    """Returns lines on the memory of tuning, the source of the figures, and the next command."""
    tuned, busy = findings["tuning"], findings["busy"]
    lines = [
        "",
        f"To tune {tuned['format']} by an adapter (sfumato tune --recompute, rows of "
        f"{tuned['tokens']:,} tokens) takes about {size(tuned['memory'])}: it "
        f"{_FITS[tuned['fits']]}.",
    ]
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
    if (taken := best(findings["formats"])) is not None:
        disk = f"; {size(free)} of disk are free" if (free := findings["disk_free"]) else ""
        lines.append(f"Get it ({size(taken['download'])}{disk}):")
        lines.append(f"  sfumato pull {taken['name']}")
        tower = size(catalog.TOWER)
        lines.append(f"To read pictures, its vision tower takes {tower} of disk and memory more.")
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


def measure(device: torch.device, cores: int) -> Measured:
    """Runs every probe several times, for a few seconds at most.

    On a CPU one thread comes first, whose own processor time other work does not lengthen: where
    it gets less of its core than it wants, that time stands for all threads. Otherwise they run.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    works = _works(device)
    if device.type != "cpu":
        walls, _ = _rounds(works, device)
        share = statistics.median(min(times) / statistics.median(times) for times in walls.values())
        return Measured(str(device), _rates(works, walls), _count(walls), load, share, cores)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        walls, own = _rounds(works, device)
    finally:
        torch.set_num_threads(threads)
    pairs = ((sum(own[name]), sum(walls[name])) for name in works)
    share = min(1.0, statistics.median(used / wall for used, wall in pairs))
    alone = Measured(str(device), _rates(works, own), _count(own), load, share, cores)
    if threads == 1:
        return alone
    if alone.busy:
        return replace(alone, speed=_of_threads(alone.speed, min(threads, cores)))
    walls, _ = _rounds(works, device)
    return replace(alone, speed=_rates(works, walls))


def _of_threads(speed: Speed, threads: int) -> Speed:
    """What so many threads do, each on a core of its own, from the speed of one."""
    each = TOGETHER * threads if threads > 1 else 1.0
    rates = {name: rate * each for name, rate in speed.items()}
    return rates | {"read_bytes": speed["read_bytes"] * min(threads, READERS)}


Works = dict[str, tuple[float, Callable[[], object]]]
"""By name: what is done in one run, and the run."""

Times = dict[str, list[float]]


def _rounds(works: Works, device: torch.device) -> tuple[Times, Times]:
    """Seconds of each run, and those of this thread's own processor time, by name."""
    walls: Times = {name: [] for name in works}
    own: Times = {name: [] for name in works}
    for _, work in works.values():
        work()
    began = time.perf_counter()
    for done in range(ROUNDS):
        if done >= 3 and time.perf_counter() - began > ENOUGH_S:
            break
        for name, (_, work) in works.items():
            wall, used = time.perf_counter(), time.thread_time()
            work()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            own[name].append(max(time.thread_time() - used, 1e-9))
            walls[name].append(max(time.perf_counter() - wall, 1e-9))
    return walls, own


def _rates(works: Works, times: Times) -> Speed:
    return {name: works[name][0] / statistics.median(seconds) for name, seconds in times.items()}


def _count(times: Times) -> int:
    return min(map(len, times.values()))


def _works(device: torch.device) -> Works:
    side = 768 if device.type == "cpu" else 4096
    works: Works = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        works[f"{dtype_name(dtype)}_flops"] = 2.0 * side**3, partial(torch.matmul, a, b)
    source = torch.ones(1 << 25, device=device)
    works["read_bytes"] = float(source.nbytes), source.sum
    rows, columns = EXPERT
    dtype = quantized_dtype(str(device))
    blocks, spare = _blocks("Q4_K").to(device), torch.empty(EXPERT, dtype=dtype, device=device)
    works["dequantized_weights"] = float(rows * columns), lambda: ops.dense(blocks, dtype, spare)
    if device.type == "cpu" and ops.backend.startswith("compiled"):
        for format in PACKED:
            weight = torch.zeros(EXPERT, dtype=torch.bfloat16) if format == "BF16" else None
            packed = ops.pack(_blocks(format) if weight is None else weight, "int8")
            x = torch.randn(CANVAS, columns).to(dtype if weight is None else torch.bfloat16)
            works[f"{format}_flops"] = 2.0 * CANVAS * rows * columns, partial(ops.linear, x, packed)
            if format == "Q4_K":
                operations = 2.0 * EXPERT_ROWS * rows * columns
                works["expert_flops"] = operations, partial(ops.linear, x[:EXPERT_ROWS], packed)
    return works


def _blocks(format: str) -> QuantizedTensor:
    kind, (rows, columns) = FORMATS[format], EXPERT
    data = torch.zeros(rows, kind.row_width(columns), dtype=torch.uint8)
    return QuantizedTensor(data, kind, EXPERT)


def quantized_dtype(device: str) -> torch.dtype:
    """What quantized models compute in where no option says (see `pick_dtype`)."""
    return torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Work:
    """What a step computes, in floating-point operations, and the weights that it dequantizes."""

    dense: float  # of the layers, without their experts
    experts: float
    head: float  # the tied embedding once; it is also the soft embedding
    embedding: float  # weights
    weights: float  # all of them, the embedding three times

    @property
    def flop(self) -> float:
        return self.dense + self.experts + 2 * self.head


@cache
def work() -> Work:
    """The work of a step of one canvas."""
    config = config_of(random_checkpoint("26b-a4b"))
    costs = step_costs(config, StepShape(width=CANVAS), stored_bytes(config))
    flop = {cost.name: cost.flop for cost in costs}
    experts = sum(flop[name] for name in MATRICES if name.startswith("experts"))
    embedding = config.vocab_size * config.hidden_size
    weights = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return Work(
        dense=sum(flop[name] for name in MATRICES) - experts,
        experts=experts,
        head=flop["vocabulary head"] / 2,
        embedding=embedding,
        weights=weights + 2 * embedding,
    )


def step_seconds(speed: Speed, device: str, format: str, nbytes: float) -> float:
    """One step of the model in that format, whose weights take so many bytes."""
    base, step = _BASE.get(format, format), work()
    reading = nbytes / speed["read_bytes"]
    if f"{base}_flops" not in speed:
        return _dense(speed, device, base, reading)
    ratio = speed["expert_flops"] / speed["Q4_K_flops"]
    layers = (step.dense + step.experts / ratio) / speed[f"{base}_flops"]
    if base == "BF16":
        head = step.head / speed["BF16_flops"] + step.head / speed["bfloat16_flops"]
    else:
        output = base if base == "Q8_0" else "Q6_K"  # the embedding, in every K mix
        head = step.head / speed[f"{output}_flops"] + step.head / speed["float32_flops"]
        head += step.embedding / speed["dequantized_weights"]
    return LAYER_EXTRA * layers + head + reading


def _dense(speed: Speed, device: str, base: str, reading: float) -> float:
    """With torch's products alone."""
    if base == "BF16":
        return max(work().flop / speed["bfloat16_flops"], reading)
    floats = speed[f"{dtype_name(quantized_dtype(device))}_flops"]
    return work().weights / speed["dequantized_weights"] + work().flop / floats


def least_seconds(speed: Speed, nbytes: float) -> float:
    """What any program would need: the greater of the arithmetic at the best speed, and reading
    the weights once."""
    flops = max(rate for name, rate in speed.items() if name.endswith("_flops"))
    return max(work().flop / flops, nbytes / speed["read_bytes"])
