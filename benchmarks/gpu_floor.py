"""What changes of a step gain, built or not, by a model of single launches; nothing is run.

`sfumato bench --predict` counts bytes, products and launches of the whole step.  This counts for
each launch of a layer's products, with the tiles that serve, three things more: how many programs
the busiest multiprocessor has (the tail of the last wave), the bytes that all programs read through
the L2 cache, weights once for each tile of tokens and tokens once for each tile of weights, and
the instructions that unpack weights in planes, as many as `step_cost` takes from `tiles.toml`.  A
launch takes the longest of these times, its bytes from memory, and the distance of two launches.

`python -m benchmarks.gpu_floor --device h200 --format bf16` (or FP8, or Q4_K).  The last column is
the share of the whole step that is saved; of what was built, the second is what serves.  Rates
that are not those of `step_cost` are assumptions: clocks of data sheets, 64 bytes a clock from L2
to a multiprocessor, and the seconds that a program takes of the most probable tokens, or that finds
nothing to do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from sfumato.bench.step_cost import (
    CACHE_SPEED,
    LAUNCH_S,
    LIMITS,
    REACHED,
    DeviceLimits,
    StepShape,
    held_bytes,
    step_costs,
    step_time,
)
from sfumato.bench.subject import random_checkpoint, random_config
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import Tile, candidates, most_tiles, unpacking

TOKENS, HIDDEN, DENSE, EXPERT, EXPERTS, CHOSEN = 256, 2816, 2112, 704, 128, 8
SLIDING, FULL = 25, 5  # layers of the 26B-A4B
WIDTHS = {"q": (4096, 8192), "k": (2048, 1024), "v": (2048, 0), "o": (4096, 8192)}
HEADS, WIDE_HEAD = 16, 512  # of full layers
CHUNKS = 32  # of the vocabulary
MERGE_S = 6e-6
START_S, RESIDENT = 1e-6, 2  # of a program that finds nothing to do; of a multiprocessor, at a time
BYTES = {"bf16": 2.0, "FP8": 1.0, "INT8": 1.0}
"""Of a number, where weights are not in planes."""
TARGET_OF = {"FP8": "fp8", "INT8": "int8", "Q4_K": "q4_k_m", "Q8_0": "q8_0", "INT4": "int4"}
"""The format of `sfumato convert` of a whole checkpoint; bfloat16 for others."""


@dataclass(frozen=True)
class Multiprocessors:
    """clock: in Hz."""

    count: int
    clock: float


DEVICES = {
    "h200": Multiprocessors(132, 1.755e9),
    "a100": Multiprocessors(108, 1.41e9),
    "rtx-4090": Multiprocessors(128, 2.52e9),
    "rtx-3090": Multiprocessors(82, 1.70e9),
    "rtx-5090": Multiprocessors(170, 2.41e9),
    "mi300x": Multiprocessors(304, 2.1e9),
    "strix-halo": Multiprocessors(40, 2.9e9),
}


@dataclass(frozen=True)
class Setting:
    """What is multiplied where."""

    device: str
    format: str

    @property
    def limits(self) -> DeviceLimits:
        return LIMITS[self.device]

    @property
    def units(self) -> Multiprocessors:
        return DEVICES[self.device]

    @property
    def weight_bytes(self) -> float:
        if self.format in LAYOUTS:
            return sum(LAYOUTS[self.format].widths(256).values()) / 256
        return BYTES[self.format]

    @property
    def flops(self) -> float:
        codes = {"FP8": self.limits.fp8_flops, "INT8": self.limits.int8_flops}
        return codes.get(self.format, self.limits.bf16_flops)

    def tile(self, kernel: str) -> Tile:
        form = "planes" if self.format in LAYOUTS else self.format.lower().replace("bf16", "")
        return candidates("_".join(filter(None, (kernel, form))), self.limits.target)["few"][0]


def dense(
    setting: Setting, outputs: int, inputs: int, kernel: str = "linear", joined: int = 1
) -> float:
    """Seconds of a product of TOKENS tokens. joined: weights whose rows a program has at a time, as
    of gate and up."""
    return launch(dense_times(setting, outputs, inputs, kernel, joined))


def dense_times(
    setting: Setting, outputs: int, inputs: int, kernel: str = "linear", joined: int = 1
) -> Sequence[float]:
    tile = setting.tile(kernel)
    columns = math.ceil(TOKENS / tile["TOKENS"])
    programs = math.ceil(outputs / joined / tile["OUT"]) * columns
    work = joined * tile["OUT"] * inputs
    return times(setting, kernel, programs, work, inputs, tile["TOKENS"], outputs * inputs)


def launch(times: Sequence[float]) -> float:
    """Seconds of a launch that has all it needs at the same time."""
    return max(times) + LAUNCH_S


def times(
    setting: Setting, kernel: str, programs: int, work: int, inputs: int, tokens: int, weights: int
) -> Sequence[float]:
    """Seconds of memory, of products, of the L2 cache, of one multiprocessor's share of it, and of
    instructions. work: weights that a program multiplies by `tokens` tokens; weights: of all, which
    are read from memory once."""
    units, limits = setting.units, setting.limits
    busiest = math.ceil(programs / units.count)
    moved = work * setting.weight_bytes + inputs * tokens * BYTES.get(setting.format, 2.0)
    of_planes = setting.format in LAYOUTS
    unpacks = unpacking(f"{kernel}_planes", setting.format, limits.target) if of_planes else 0.0
    return (
        weights * setting.weight_bytes / limits.bytes_per_s / REACHED,
        busiest * 2.0 * work * tokens / (setting.flops / units.count) / REACHED,
        programs * moved / (CACHE_SPEED * limits.bytes_per_s),
        busiest * moved / (64 * units.clock),
        busiest * work * unpacks / (limits.issued / units.count),
    )


def mixture(setting: Setting, tokens: int | None = None) -> float:
    """Seconds of both products of all experts. tokens: of a tile; None: as they serve."""
    return sum(map(launch, mixture_times(setting, tokens)))


def mixture_times(setting: Setting, tokens: int | None = None) -> Sequence[Sequence[float]]:
    first = grouped(setting, "experts_gate_up", 2 * EXPERT, HIDDEN, tokens, 2)
    return first, grouped(setting, "experts_down", HIDDEN, EXPERT, tokens)


def taken_in_turn(setting: Setting) -> float:
    """Seconds of `mixture` by programs that take tiles in turn: the others wait START_S
    for each that the worst choice alone would need, and those never start."""
    tile = setting.tile("experts_gate_up")["TOKENS"]
    idle = most_tiles(TOKENS * CHOSEN, EXPERTS, tile) - EXPERTS
    rows = (
        math.ceil(width / setting.tile(kernel)["OUT"])
        for kernel, width in (("experts_gate_up", EXPERT), ("experts_down", HIDDEN))
    )
    at_once = setting.units.count * RESIDENT
    return mixture(setting) - sum(idle * each / at_once * START_S for each in rows)


def beside(setting: Setting) -> float:
    """Seconds of the dense MLP and the experts on two streams: of each thing that launches need,
    both need the sum.  The fork and the join are taken for the distance of two launches each."""
    experts = mixture_times(setting)
    gate_up = dense_times(setting, 2 * DENSE, HIDDEN, "linear_gated", 2)
    down = dense_times(setting, HIDDEN, DENSE)
    shared = max(sum(each) for each in zip(*experts, gate_up, down, strict=True))
    launches = len(experts) * LAUNCH_S
    return max(mixture(setting), shared + launches) + 2 * LAUNCH_S


def grouped(
    setting: Setting, kernel: str, outputs: int, inputs: int, tokens: int | None, joined: int = 1
) -> Sequence[float]:
    """`times` of a product of all experts, whose tokens fit one tile each."""
    tile = setting.tile(kernel)
    programs = EXPERTS * math.ceil(outputs / joined / tile["OUT"])
    work = joined * tile["OUT"] * inputs
    tokens = tokens or tile["TOKENS"]
    weights = EXPERTS * outputs * inputs
    return times(setting, kernel, programs, work, inputs, tokens, weights)


def attention(setting: Setting, rows: int, prefix: int, pieces: float, shortest: int) -> float:
    """Seconds of a full layer's attention of rows behind prefixes in so many pieces at most. Keys
    and values are read by each tile of ROWS, and the parts of a row written, then read."""
    units, limits = setting.units, setting.limits
    length = max(math.ceil(prefix / pieces), shortest)
    pieces = math.ceil(prefix / length)
    each = candidates("attention_512", limits.target)["any"][0]["ROWS"]
    tiles = math.ceil(TOKENS * HEADS / each)
    # The keys of the programs as they begin; the first piece has those of the canvas too.
    keys = [min(length, prefix - at) + TOKENS * (at == 0) for at in range(0, prefix, length)]
    programs = [count for count in keys for _ in range(tiles)] * rows
    busy = [0] * units.count
    for count in programs:
        heapreplace(busy, busy[0] + count)  # the multiprocessor that is free first
    busiest = max(busy)
    seconds = launch((
        busiest * 4.0 * each * WIDE_HEAD / (limits.bf16_flops / units.count) / REACHED,
        busiest * 4.0 * WIDE_HEAD / (64 * units.clock),
        sum(programs) * 4.0 * WIDE_HEAD / (CACHE_SPEED * limits.bytes_per_s),
    ))  # fmt: skip
    parts = 4.0 * rows * pieces * TOKENS * HEADS * WIDE_HEAD
    speed = limits.bytes_per_s * (CACHE_SPEED if parts <= limits.cache else 1)
    return seconds + (2 * parts / speed + LAUNCH_S) * (pieces > 1)


def layers(of: Iterable[float]) -> float:
    """Of all layers. of: seconds of a sliding and of a full one."""
    return sum(count * each for count, each in zip((SLIDING, FULL), of, strict=True))


def changes(setting: Setting) -> dict[str, tuple[float, float]]:
    """Seconds before and after each change, of all layers of a step of one row."""
    codes = setting.format in ("FP8", "INT8")
    rounding = (LAUNCH_S + TOKENS * HIDDEN * 3 / setting.limits.bytes_per_s) * codes
    apart, joined = [], []
    for kind in (0, 1):
        widths = [WIDTHS[name][kind] for name in "qkv" if WIDTHS[name][kind]]
        apart.append(sum(dense(setting, width, HIDDEN) + rounding for width in widths))
        joined.append(dense(setting, sum(widths), HIDDEN) + rounding)
    element = LAUNCH_S + 6.0 * TOKENS * DENSE / setting.limits.bytes_per_s / CACHE_SPEED
    gate_up = 2 * (dense(setting, DENSE, HIDDEN) + rounding) + element
    one = dense(setting, 2 * DENSE, HIDDEN, "linear_gated", 2) + rounding
    mlp = one + dense(setting, HIDDEN, DENSE) + rounding
    long, short = mixture(setting, 64), mixture(setting, 32)
    experts = mixture(setting)
    both = SLIDING + FULL
    alone = sum(dense(setting, *shape) for shape in ((HIDDEN, 4096), (HIDDEN, DENSE)))
    best = sum(at_best(setting, *shape) for shape in ((HIDDEN, 4096), (HIDDEN, DENSE)))
    router = 2.0 * TOKENS * HIDDEN * EXPERTS / REACHED
    scalar = router / setting.limits.float32_flops
    return {
        "q, k and v as one product": (layers(apart), layers(joined)),
        "gate and up as one, with the activation": (both * gate_up, both * one),
        "the experts' products, 64 and 32 tokens": (both * long, both * short),
        "a persistent schedule for the experts": (
            both * experts, both * taken_in_turn(setting),
        ),
        "the dense MLP beside the experts": (both * (mlp + experts), both * beside(setting)),
        "o and down at the product's best rate": (both * alone, both * best),
        "the router in three products of TF32": (
            both * scalar, both * 3 * router / (setting.limits.bf16_flops / 2),
        ),
        "the most probable tokens in a launch": (
            CHUNKS * MERGE_S * math.ceil(TOKENS / setting.units.count),
            CHUNKS * (MERGE_S + LAUNCH_S),
        ),
    }  # fmt: skip


def split_keys(setting: Setting) -> Iterator[tuple[str, float, float, float]]:
    """By rows and prefix: seconds of all layers in pieces of 4,096 keys, in those of the tile that
    serves, and of the whole step."""
    tile = candidates("attention_512", setting.limits.target)["any"][0]
    served = tile["PIECES"], tile["SHORTEST"]
    for rows in (1, 16):
        for prefix in (512, 4096, 32_768, 262_144):
            given = setting, rows, prefix
            before, after = attention(*given, math.inf, 4096), attention(*given, *served)
            name = f"keys split by length, rows {rows}, prefix {prefix}"
            yield name, FULL * before, FULL * after, step_seconds(*given)


def at_best(setting: Setting, outputs: int, inputs: int) -> float:
    """Seconds of a product of TOKENS tokens without tails, nor tiles read again: what no library's
    exceeds."""
    bytes_s = outputs * inputs * setting.weight_bytes / setting.limits.bytes_per_s
    flops_s = 2.0 * TOKENS * outputs * inputs / setting.flops
    return max(bytes_s, flops_s) / REACHED + LAUNCH_S


def step_seconds(setting: Setting, rows: int = 1, prefix: int = 512) -> float:
    """Seconds of a step, by `step_cost`."""
    config = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b"), {})
    checkpoint = random_checkpoint("26b-a4b", TARGET_OF.get(setting.format, "bf16"))
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    shape = StepShape(rows, prefix=prefix)
    costs = step_costs(config, shape, held_bytes(checkpoint.tensors), formats=formats)
    return step_time(costs, setting.limits).predicted_ms / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--device", choices=list(DEVICES), default="h200")
    parser.add_argument("--format", choices=[*BYTES, *LAYOUTS], default="bf16")
    given = parser.parse_args()
    setting = Setting(given.device, given.format)
    step = step_seconds(setting)
    print(f"{given.device}, {given.format}: ms of a step of one row, before, after, saved")
    one = [(name, *times, step) for name, times in changes(setting).items()]
    for name, before, after, step in (*one, *split_keys(setting)):
        saved, figures = before - after, f"{1e3 * before:7.2f} {1e3 * after:7.2f}"
        print(f"{name:42} {figures} {1e3 * saved:7.2f} {saved / step:7.1%}")


if __name__ == "__main__":
    main()
