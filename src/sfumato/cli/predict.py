"""`sfumato bench --predict`: a step on a device that need not be here. Runs no network."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from sfumato.cli import output

if TYPE_CHECKING:
    from sfumato.bench.step_model.kernel_cost import Products
    from sfumato.model.model_config import ModelConfig

PREFIX = 512  # tokens before the canvas, where no option says it


def main(args: argparse.Namespace) -> int:
    """Print the prediction, and return the exit code. Raises ValueError or OSError for bad
    input."""
    from rich.console import Console

    from sfumato.bench import predicted
    from sfumato.bench.step_model.device_limits import limits_named
    from sfumato.bench.step_model.step_cost import StepShape

    limits = limits_named(args.predict)
    config, stored, codes = _subject(args)
    shapes = [
        StepShape(rows, config.canvas_length, prefix)
        for rows in args.concurrency or (1,)
        for prefix in args.context or (PREFIX,)
    ]
    steps = predicted.predicted_steps(config, stored, limits, shapes, codes)
    nbytes = sum(stored.values())
    if args.json:
        text = json.dumps(predicted.to_document(steps, nbytes)) + "\n"
        if args.json == "-":
            print(text, end="")
            return 0
        output.write(args.json, text, args.force, "--json")
    console = Console(highlight=False, markup=False, emoji=False)
    for table in predicted.to_tables(steps):
        console.print(table)
    known = "measured" if limits.measured else "published, less what programs do not reach"
    print(f"Limits of {limits.name}: {known} ({limits.source}).")
    if nbytes >= limits.memory:
        print(
            f"The weights ({nbytes / 1e9:.1f} GB) do not fit its memory "
            f"({limits.memory / 1e9:.1f} GB)."
        )
    return 0


def _subject(args: argparse.Namespace) -> tuple[ModelConfig, dict[str, int], dict[str, Products]]:
    """The network, the bytes of its tensors as a GPU holds them, and what multiplies those that are
    8-bit codes: of random weights or of a checkpoint's headers."""
    from sfumato.bench.random_weights import random_checkpoint
    from sfumato.bench.step_model.step_cost import codes_of
    from sfumato.model.codes_on_load import as_all_codes
    from sfumato.model.families import open_checkpoint
    from sfumato.model.loading import config_of
    from sfumato.ops.triton.planes import plane_bytes, refusal
    from sfumato.weights.checkpoint import Checkpoint

    checkpoint: Checkpoint
    if args.random_weights:
        checkpoint = random_checkpoint(args.random_weights, args.format or "bf16", args.layers)
    elif args.model:
        checkpoint = as_all_codes(open_checkpoint(args.model))
    else:
        raise ValueError("--predict: of what: give --random-weights 26b-a4b, or -m with a file")
    held = {
        name: info.nbytes
        if refusal(info.format, info.shape)
        else plane_bytes(info.format, info.shape)
        for name, info in checkpoint.tensors.items()
    }
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    return config_of(checkpoint), held, codes_of(formats)
