"""Pictures beside a denoising step: reading, the tower and its soft tokens, interleaved.

    .venv/bin/python -m benchmarks.pictures [--tokens 280 560 1120] [--side 1024]
        [--towers q8_0 bf16] [--rounds 3] [--threads 2] [--step q4_k_m]

The tower has the real one's sizes and random weights. Matrices of a Q8_0 tower whose rows divide
into blocks are Q8_0, the others (the down projections) bfloat16, as in an mmproj file. A picture is
a JPEG file of side × side pixels; reading decodes, resizes and cuts it.

The step is an early one, in which nothing is left out, of the 26B-A4B's sizes with random weights:
four times one of 6 layers with a quarter of the vocabulary, and one of 6 layers with next to none,
which makes 30 layers and the whole vocabulary. Each round times everything once; figures are
medians of seconds by the wall clock. Prints a table and one JSON line. Exit code 1 where a Q8_0
tower reads a picture of 280 tokens in more than two steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tests.support.denoise import denoise_step
from tests.support.pictures import file_of, picture

from sfumato import ops
from sfumato.bench.subject import random_subject
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps
from sfumato.media.patches import Cut, Patches, patches_of
from sfumato.media.picture import read_picture
from sfumato.model.loading import place
from sfumato.model.vision.config import VisionConfig
from sfumato.model.vision.tower import Encoding, VisionTower
from sfumato.ops.cpu.library import describe
from sfumato.weights.formats import FORMATS, Weight, quantize

REAL = VisionConfig(1152, 4304, 27, 16, 16, 72, 16, 3, 10240, 2816, standardizes=True)
LAYERS, QUARTER, FEW_TOKENS = 6, 65536, 1024
CANVAS, PREFIX = 256, 256
GOAL = 2.0  # steps


def random_tower(kind: str) -> VisionTower:
    with torch.device("meta"):
        tower = VisionTower(REAL).requires_grad_(False)
    for name, parameter in list(tower.named_parameters()):
        path, _, leaf = name.rpartition(".")
        numbers = torch.randn(parameter.shape).mul_(parameter.shape[-1] ** -0.5)
        value: Weight = numbers.bfloat16() if len(parameter.shape) > 1 else numbers + 1
        # The matrix of the patches is stored in another order, and so becomes floats.
        if leaf == "weight" and len(parameter.shape) == 2:
            format = FORMATS[kind.upper()]
            if kind != "bf16" and format.divides(parameter.shape[-1]) and "patch" not in name:
                value = quantize(numbers, format)
            value = ops.pack(value, "int8")
        place(tower.get_submodule(path), leaf, value)
    return tower


def encoded(tower: VisionTower, patches: Patches) -> torch.Tensor:
    tokens = Encoding(tower, torch.from_numpy(patches.values()), patches.columns).advance()
    assert tokens is not None and tokens.isfinite().all()
    return tokens


def cut_from(file: bytes, cut: Cut) -> Patches:
    return patches_of(read_picture(file), cut)


def products(patches: int) -> float:
    """Multiplications and additions of the tower, as its sizes ask for them."""
    heads = REAL.num_heads * REAL.head_dim
    layer = REAL.hidden_size * (4 * heads + 3 * REAL.intermediate_size) + 2 * patches * heads
    return 2.0 * patches * REAL.num_layers * layer


def step_of(format: str, vocab: int) -> Callable[[], object]:
    """Runs the second step of a canvas at every call."""
    network = random_subject("26b-a4b", format, LAYERS, "cpu", vocab=vocab).network
    size = network.config.vocab_size
    slot = network.new_slot(PREFIX)
    network.encode([torch.arange(PREFIX) % size], [slot])
    config = replace(fixed_steps(48).over(REFERENCE), canvas_length=CANVAS)
    canvas = Canvas(config, Noise(0, 0), size, network.device)
    denoise_step(network, [canvas], [slot])
    assert canvas.place
    batch, row = canvas.place
    start = [tensor[row].clone() for tensor in batch.tensors()]

    def step() -> None:
        canvas.step, canvas.convergence = 1, None
        for tensor, value in zip(batch.tensors(), start, strict=True):
            tensor[row].copy_(value)
        denoise_step(network, [canvas], [slot])

    return step


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@torch.inference_mode()
def measure(options: argparse.Namespace) -> tuple[float, list[dict[str, float | str]]]:
    """Seconds of a step, and the figures of each tower and budget."""
    quarter, layers = step_of(options.step, QUARTER), step_of(options.step, FEW_TOKENS)
    towers = {kind: random_tower(kind) for kind in options.towers}
    file = file_of(picture(options.side, options.side), "JPEG")
    cuts = {tokens: Cut(REAL.patch, REAL.pool, tokens) for tokens in options.tokens}
    read = {tokens: cut_from(file, cut) for tokens, cut in cuts.items()}
    for tower in towers.values():  # what is made once
        encoded(tower, cut_from(file, Cut(tokens=70)))
    steps, reading, running = [], {t: [] for t in cuts}, {(k, t): [] for k in towers for t in cuts}
    for _ in range(options.rounds):
        steps.append(4 * timed(quarter) + timed(layers))
        for tokens, cut in cuts.items():
            reading[tokens].append(timed(partial(cut_from, file, cut)))
            for kind, tower in towers.items():
                running[kind, tokens].append(timed(partial(encoded, tower, read[tokens])))
    step, rows = statistics.median(steps), []
    for (kind, tokens), seconds in running.items():
        count, first = len(read[tokens].levels), statistics.median(reading[tokens])
        second = statistics.median(seconds)
        rows.append({
            "tower": kind, "budget": tokens, "soft_tokens": read[tokens].soft_tokens,
            "read_ms": 1e3 * first, "tower_s": second, "gflops": products(count) / second / 1e9,
            "steps": (first + second) / step,
        })  # fmt: skip
    return step, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[280, 560, 1120])
    parser.add_argument("--side", type=int, default=1024, help="pixels (%(default)s)")
    parser.add_argument("--towers", nargs="+", choices=("q8_0", "bf16"), default=["q8_0", "bf16"])
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--step", default="q4_k_m", help="the step's format (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    step, rows = measure(options)
    print(f"a step: {step:.2f} s ({describe()[0]})")
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(x if isinstance(x, str) else f"{x:.4g}" for x in row.values()))
    print(json.dumps({"benchmark": "pictures", **vars(options), "step_s": step, "figures": rows}))
    slow = [r for r in rows if r["tower"] == "q8_0" and r["budget"] == 280 and r["steps"] > GOAL]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
