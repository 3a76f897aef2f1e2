"""Short measurements of a machine: how fast are the operations that a denoising step consists of,
and what a step of DiffusionGemma 26B-A4B would take.

Each probe runs in turn with all others, several times over, and the median counts. How much of the
time a thread had for itself shows whether other programs use the machine.

What a step computes is the step model's (`bench/step_cost.py`). So many positions reach nearly
every expert, so that a step reads all weights once. Compiled operations multiply the blocks; only
the soft embedding dequantizes, and multiplies floats. Without them all that a step reaches is
dequantized: the layers once, the embedding up to three times: for the cutoffs of top-k and top-p,
the statistics, the draw.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from sfumato import ops
from sfumato.bench.random_weights import random_checkpoint
from sfumato.bench.step_cost import MATRICES, StepShape, step_costs, stored_bytes
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.placement import multiplies_bfloat16
from sfumato.weights.formats import FORMATS, QuantizedTensor

EXPERT = (1408, 2816)  # one expert's larger matrix: what is dequantized, or multiplied, in one go
CANVAS = 256
EXPERT_ROWS = CANVAS * 8 // 128  # positions that an expert has on average
PANELS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")
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
        for format in PANELS:
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
