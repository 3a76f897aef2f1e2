"""What changes of the products would gain in a step, by a model of single launches; nothing is run.

`sfumato bench --predict` counts bytes, products and launches of the whole step.  This counts for
each launch of a layer's products, with the tiles that serve, three things more: how many programs
the busiest multiprocessor has (the tail of the last wave), the bytes that all programs read through
the L2 cache, weights once for each tile of tokens and tokens once for each tile of weights, and
the instructions that unpack weights in planes, each as many as `benchmarks.gpu_unpack` counts.  A
launch takes the longest of these times, its bytes from memory, and the distance of two launches.

`python -m benchmarks.gpu_floor --device h200 --format bf16` (or FP8, or of planes with the
instructions of a weight: `--format Q4_K --instructions 10.2`).  Rates that are not those of
`step_cost` are assumptions: clocks of data sheets, 64 bytes a clock from L2 to a multiprocessor,
and the seconds that a program of the most probable tokens takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sfumato.bench.step_cost import CACHE_SPEED, LAUNCH_S, LIMITS, REACHED, DeviceLimits
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import Tile, candidates

TOKENS, HIDDEN, DENSE, EXPERT, EXPERTS, CHOSEN = 256, 2816, 2112, 704, 128, 8
SLIDING, FULL = 25, 5  # layers of the 26B-A4B
WIDTHS = {"q": (4096, 8192), "k": (2048, 1024), "v": (2048, 0), "o": (4096, 8192)}
CHUNKS = 32  # of the vocabulary
MERGE_S = 6e-6
BYTES = {"bf16": 2.0, "FP8": 1.0, "INT8": 1.0}
"""Of a number, where weights are not in planes."""


@dataclass(frozen=True)
class Multiprocessors:
    """count; clock in Hz; issued: instructions of a thread that one issues in a clock."""

    target: str
    count: int
    clock: float
    issued: int = 128


DEVICES = {
    "h200": Multiprocessors("sm_90", 132, 1.755e9),
    "a100": Multiprocessors("sm_80", 108, 1.41e9, 64 * 2),
    "rtx-4090": Multiprocessors("sm_89", 128, 2.52e9),
    "rtx-3090": Multiprocessors("sm_86", 82, 1.70e9),
}


@dataclass(frozen=True)
class Setting:
    """What is multiplied where. instructions: of each weight that is unpacked."""

    device: str
    format: str
    instructions: float

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
        return candidates("_".join(filter(None, (kernel, form))), self.units.target)["few"][0]


def dense(setting: Setting, outputs: int, inputs: int, tile: Tile | None = None,
          joined: int = 1) -> float:  # fmt: skip
    """Seconds of a product of TOKENS tokens. joined: weights whose rows a program has at a time, as
    of gate and up."""
    tile = tile or setting.tile("linear")
    columns = math.ceil(TOKENS / tile["TOKENS"])
    programs = math.ceil(outputs / joined / tile["OUT"]) * columns
    work = joined * tile["OUT"] * inputs
    return launch(setting, programs, work, inputs, tile["TOKENS"], outputs * inputs)


def launch(
    setting: Setting, programs: int, work: int, inputs: int, tokens: int, weights: int
) -> float:
    """Seconds. work: weights that a program multiplies by `tokens` tokens; weights: of all, which
    are read from memory once."""
    units, limits = setting.units, setting.limits
    busiest = math.ceil(programs / units.count)
    moved = work * setting.weight_bytes + inputs * tokens * BYTES.get(setting.format, 2.0)
    unpacks = setting.instructions if setting.format in LAYOUTS else 0.0
    times = (
        weights * setting.weight_bytes / limits.bytes_per_s / REACHED,
        busiest * 2.0 * work * tokens / (setting.flops / units.count) / REACHED,
        programs * moved / (CACHE_SPEED * limits.bytes_per_s),
        busiest * moved / (64 * units.clock),
        busiest * work * unpacks / (units.issued * units.clock),
    )
    return max(times) + LAUNCH_S


def mixture(setting: Setting, tokens: int | None = None) -> float:
    """Seconds of both products of all experts. tokens: of a tile; None: as they serve."""
    first = grouped(setting, "experts_gate_up", 2 * EXPERT, HIDDEN, tokens, 2)
    return first + grouped(setting, "experts_down", HIDDEN, EXPERT, tokens)


def grouped(
    setting: Setting, kernel: str, outputs: int, inputs: int, tokens: int | None, joined: int = 1
) -> float:
    """Seconds of a product of all experts, whose tokens fit one tile each."""
    tile = setting.tile(kernel)
    programs = EXPERTS * math.ceil(outputs / joined / tile["OUT"])
    work = joined * tile["OUT"] * inputs
    tokens = tokens or tile["TOKENS"]
    return launch(setting, programs, work, inputs, tokens, EXPERTS * outputs * inputs)


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
        tiles = (None, *wider(setting))
        joined.append(min(dense(setting, sum(widths), HIDDEN, tile) for tile in tiles) + rounding)
    element = LAUNCH_S + 6.0 * TOKENS * DENSE / setting.limits.bytes_per_s / CACHE_SPEED
    gate_up = 2 * (dense(setting, DENSE, HIDDEN) + rounding) + element
    tiles = (None, *wider(setting))
    one = min(dense(setting, 2 * DENSE, HIDDEN, tile, 2) for tile in tiles) + rounding
    mlp = one + dense(setting, HIDDEN, DENSE) + rounding
    long, short = mixture(setting, 64), mixture(setting, 32)
    experts = mixture(setting)
    both = SLIDING + FULL
    router = 2.0 * TOKENS * HIDDEN * EXPERTS / REACHED
    scalar = router / setting.limits.float32_flops
    return {
        "q, k and v as one product": (layers(apart), layers(joined)),
        "gate and up as one, with the activation": (both * gate_up, both * one),
        "the experts' products, 64 and 32 tokens": (both * long, both * short),
        "the dense MLP beside the experts": (
            both * (mlp + experts), both * max(mlp, experts),
        ),
        "the router in three products of TF32": (
            both * scalar, both * 3 * router / (setting.limits.bf16_flops / 2),
        ),
        "the most probable tokens in a launch": (
            CHUNKS * MERGE_S * math.ceil(TOKENS / setting.units.count),
            CHUNKS * (MERGE_S + LAUNCH_S),
        ),
    }  # fmt: skip


def wider(setting: Setting) -> list[Tile]:
    """The tile of the dense products with 64 tokens, and with as many weights as tokens."""
    tile = setting.tile("linear")
    return [
        replace(tile, constants={**tile.constants, **own})
        for own in ({"TOKENS": 64}, {"OUT": tile["TOKENS"]})
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--device", choices=list(DEVICES), default="h200")
    parser.add_argument("--format", choices=[*BYTES, *LAYOUTS], default="bf16")
    parser.add_argument("--instructions", type=float, default=10.0, help="to unpack a weight")
    given = parser.parse_args()
    setting = Setting(given.device, given.format, given.instructions)
    print(f"{given.device}, {given.format}: ms of a step of one row, before, after, saved")
    for name, (before, after) in changes(setting).items():
        saved = 1e3 * (before - after)
        print(f"{name:42} {1e3 * before:7.2f} {1e3 * after:7.2f} {saved:7.2f}")


if __name__ == "__main__":
    main()
