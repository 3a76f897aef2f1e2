"""What turbo costs and saves: steps that leave out settled positions, against whole ones.

    .venv/bin/python -m benchmarks.turbo [--tasks 100] [--accepted 2] [--steps 16]
    .venv/bin/python -m benchmarks.turbo --speed [--layers 6] [--format q4_k_m]

The first form answers held-out tasks with the embedded model.  Each canvas takes `--steps` steps,
in which `fixed-count` accepts `--accepted` positions more each time: by the usual rule this model's
canvases settle in so few steps that nothing is left to save.  Printed are, for each setting, the
share of answers that are right, the share that equal those of whole steps, and the share of
positions that were computed.  The second form times steps of a random model of real layers at given
shares of computed positions, whole steps among them, in turns; medians of the steps.  Each form
prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import sfumato
from sfumato.api import Model
from sfumato.bench.subject import random_subject
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import FixedCount
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig, fixed_steps
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.recompute import Kept
from sfumato.diffusion.stopping import Never
from sfumato.diffusion.turbo import Turbo
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.train.embedded_data import Evaluation, evaluation_sets

SETTINGS = {
    "default": Turbo(),
    "settled 0.1": Turbo(settled=0.1),
    "settled 0.001": Turbo(settled=0.001),
    "near 0": Turbo(near=0),
    "near 4": Turbo(near=4),
    "first 6": Turbo(first=6),
    "partial 1": Turbo(partial=1),
    "partial 4": Turbo(partial=4),
}
SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)


class Counted:
    """Counts what canvases in turbo compute."""

    def __init__(self) -> None:
        self.computed = self.positions = self.partial = self.steps = 0
        took = Kept.took

        def counted(kept: Kept, *args: Any) -> None:
            places: Tensor | None = args[-1]
            self.steps += 1
            self.partial += places is not None
            self.positions += kept.length
            self.computed += kept.length if places is None else len(places)
            took(kept, *args)

        Kept.took = counted  # type: ignore[method-assign]

    def clear(self) -> None:
        self.computed = self.positions = self.partial = self.steps = 0


def texts(model: Model, tasks: Sequence[Evaluation], config: SamplerConfig) -> list[str]:
    return [
        model.generate(messages=task.messages, max_tokens=32, seed=seed, sampler=config).text
        for seed, task in enumerate(tasks)
    ]


def quality(count: int, accepted: int, steps: int) -> list[dict[str, Any]]:
    model, counted = sfumato.load(), Counted()
    sets = evaluation_sets(0, count)
    tasks = [*sets["sudoku_hard"][:count], *sets["questions"][:count]]
    config = SamplerConfig(sampler=FixedCount(accepted), stopping=Never(), max_steps=steps)
    first = texts(model, tasks, config)
    rows = []
    for name, turbo in {"whole steps": None, **SETTINGS}.items():
        counted.clear()
        if turbo is None:
            made = first
        else:
            made = texts(model, tasks, SamplerConfig(**vars(config) | {"turbo": turbo}))
        right = sum(a == b.expected for a, b in zip(made, tasks, strict=True))
        same = sum(a == b for a, b in zip(made, first, strict=True))
        rows.append(
            {
                "setting": name,
                "right": round(right / len(tasks), 4),
                "same": round(same / len(tasks), 4),
                "computed": round(counted.computed / max(1, counted.positions), 4),
                "partial": round(counted.partial / max(1, counted.steps), 4),
            }
        )
    rows[0] |= {"computed": 1.0}
    return rows


def step_seconds(network: Network, slot: Slot, share: float) -> float:
    """Of one step after two whole ones, at which so many of the positions are computed."""
    length = network.config.canvas_length
    turbo = None if share == 1 else Turbo(first=2, partial=2, near=0)
    config = SamplerConfig(**vars(fixed_steps(8).over(REFERENCE)) | {"turbo": turbo})
    config = SamplerConfig(**vars(config) | {"canvas_length": length})
    canvas = Canvas(config, Noise(0, 0), network.config.vocab_size, network.device)
    denoiser = Denoiser(network, 1)
    for _ in range(2):
        denoiser.step([canvas], [slot])
    if canvas.kept is not None:  # which positions have settled is given
        canvas.kept.settled = torch.arange(length) >= share * length
        if share > 0.5:
            canvas.kept.places = lambda: torch.arange(round(share * length))  # type: ignore
    began = time.perf_counter()
    denoiser.step([canvas], [slot])
    return time.perf_counter() - began


def speed(layers: int, kind: str, prompt: int, rounds: int) -> list[dict[str, Any]]:
    network = random_subject("26b-a4b", kind, layers).network
    slot = network.new_slot(prompt)
    network.encode([torch.randint(5, 1000, (prompt,))], [slot])
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(rounds):
        for share in SHARES:
            seconds[share].append(step_seconds(network, slot, share))
    medians = {share: statistics.median(each) for share, each in seconds.items()}
    return [
        {"computed": share, "ms": round(each * 1e3, 1), "ratio": round(medians[1.0] / each, 3)}
        for share, each in medians.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=100, help="of each kind (%(default)s)")
    parser.add_argument("--accepted", type=int, default=2, help="a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="of a canvas (%(default)s)")
    parser.add_argument("--speed", action="store_true", help="time steps of real layers")
    parser.add_argument("--layers", type=int, default=6, help="of the random model (%(default)s)")
    parser.add_argument("--format", default="q4_k_m", help="of its weights (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="its tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps (%(default)s)")
    options = parser.parse_args()
    if options.speed:
        rows = speed(options.layers, options.format, options.prompt, options.rounds)
    else:
        rows = quality(options.tasks, options.accepted, options.steps)
    print("  ".join(f"{key:>14}" for key in rows[-1]))
    for row in rows:
        print("  ".join(f"{row.get(key, ''):>14}" for key in rows[-1]))
    print(json.dumps({"benchmark": "turbo", "rows": rows}))
    return 0


if __name__ == "__main__":
    main()
