"""`sfumato tune`: an adapter for a model, or all of its weights, learnt from conversations."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from sfumato.cli import terminal
from sfumato.options.tuning import TUNING


def main(args: argparse.Namespace) -> int:
    """Tunes the model that the options name. Raises ValueError or OSError for bad input."""
    with terminal.loading():
        import torch

        import sfumato
        from sfumato.cli import generation
        from sfumato.train.run_folder import check_out
        from sfumato.train.tune import Tuning, tune
    check_out(Path(args.out), args.resume, args.force)  # before a model that takes minutes
    generation.check_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    given = {each.name: getattr(args, each.name) for each in TUNING}
    tuning = Tuning(**given | {"targets": tuple(given["targets"])})
    with terminal.progress("loading", in_bytes=True, least=generation.LARGE) as shown:
        model = sfumato.load(
            args.model,
            device=args.device,
            dtype=args.dtype,
            progress=shown,
            activations="bf16",  # of a base whose products are those of training
            quantize=args.quantize,
            mmproj=args.mmproj,
        )
    stop = _Stop()
    with (
        terminal.progress("tuning") as progress,
        terminal.handling([signal.SIGINT], stop, signal.default_int_handler),
        terminal.handling([signal.SIGTERM], stop, signal.getsignal(signal.SIGTERM)),
    ):
        tuned = tune(
            model,
            args.data,
            args.out,
            tuning,
            held_out=_share(args.held_out),
            resume=args.resume,
            force=args.force,
            progress=progress,
            report=lambda line: print(line, file=sys.stderr),
            stopped=lambda: stop.wanted,
        )
    held = "" if tuned.held_out is None else f", held-out loss {tuned.held_out:.4f}"
    why = {"steps": "", "patience": ", ended by --patience", "stopped": ", interrupted"}
    print(f"{tuned.out}: {tuned.steps:,} steps{held}{why[tuned.ended]}")
    if tuned.ended == "stopped":
        print(f"go on with --resume --out {args.out}", file=sys.stderr)
    return 130 if tuned.ended == "stopped" else 0


def _share(text: str) -> float | Path:
    """A share of the conversations, or a file of others."""
    try:
        return float(text)
    except ValueError:
        return Path(text)


class _Stop:
    """Asks a run to end after its step; a second signal ends it at once."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        print("ending after this step, with a checkpoint; again: at once", file=sys.stderr)
