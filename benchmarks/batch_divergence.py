"""How often a text differs when it is denoised in a batch instead of alone.

Matrix products of another shape round otherwise, and one flipped draw changes all that follows.
Prints a table and one JSON line:

    python benchmarks/batch_divergence.py [--model PATH] [--prompts 32] [--batch 8]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import sfumato
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.step import Denoiser
from sfumato.train.embedded_data import evaluation_sets


def first_canvases(
    model: sfumato.Model, prompts: Sequence[list[int]], first_seed: int
) -> list[dict[str, Any]]:
    """The first canvas of each prompt, all denoised in one batch that shrinks as rows finish."""
    network = model.network
    config = replace(model.sampler_defaults, canvas_length=model.config.canvas_length)
    rows = []
    for seed, ids in enumerate(prompts, first_seed):
        slot = network.new_slot(len(ids))
        network.encode([torch.tensor(ids)], [slot])
        noise = Noise(seed, 0)
        rows.append((Canvas(config, noise, network.config.vocab_size, network.device), slot))
    canvases = [canvas for canvas, _ in rows]
    denoiser = Denoiser(network, len(rows))
    while live := [row for row in rows if not row[0].done]:
        denoiser.step([row[0] for row in live], [row[1] for row in live])
    return [{"ids": canvas.history[-1].tolist(), "steps": canvas.step} for canvas in canvases]


def visible(ids: list[int], ends: Sequence[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in ends), None)]


def measure(model: sfumato.Model, prompts: Sequence[list[int]], batch: int) -> dict[str, Any]:
    texts, steps = 0, 0
    for at in range(0, len(prompts), batch):
        group = prompts[at : at + batch]
        together = first_canvases(model, group, at)
        for i, ids in enumerate(group):
            (alone,) = first_canvases(model, [ids], at + i)
            ends = model.end_ids
            texts += visible(alone["ids"], ends) != visible(together[i]["ids"], ends)
            steps += alone["steps"] != together[i]["steps"]
    return {"prompts": len(prompts), "batch": batch, "texts_differ": texts, "steps_differ": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a checkpoint; the embedded model by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    figures: dict[str, Any] = {}
    print(f"{'dtype':<10}{'prompts':>9}{'batch':>7}{'texts differ':>14}{'steps differ':>14}")
    for dtype in ("float32", "bfloat16"):
        model = sfumato.load(args.model, device=args.device, dtype=dtype)
        sets = evaluation_sets(count=args.prompts)
        tasks = [task for group in zip(*sets.values(), strict=False) for task in group]
        prompts = [model.prompt_ids(messages=task.messages) for task in tasks[: args.prompts]]
        measured = figures[dtype] = measure(model, prompts, args.batch)
        print(
            f"{dtype:<10}{measured['prompts']:>9}{measured['batch']:>7}"
            f"{measured['texts_differ']:>14}{measured['steps_differ']:>14}"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
