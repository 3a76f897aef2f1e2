"""`sfumato train` and `sfumato eval`: recipes and measurements of sfumato.train, by name."""

from __future__ import annotations

import argparse
from pathlib import Path

from sfumato.cli import terminal


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    return _train(args) if args.command == "train" else _evaluate(args)


def _train(args: argparse.Namespace) -> int:
    import torch

    from sfumato.convert.files import check_checkpoint_folder
    from sfumato.train import recipe
    from sfumato.weights.files.atomic_write import check_writable

    out = Path(args.out)
    if out.exists() or out.parent.is_dir():  # else it is made
        check_writable(out, args.force, check_checkpoint_folder)
    if args.threads:
        torch.set_num_threads(args.threads)
    with terminal.progress("training") as progress:
        start = getattr(args, "from")  # a keyword of Python
        recipe.run(
            args.recipe,
            out,
            steps=args.steps,
            seed=args.seed,
            progress=progress,
            begin_with=Path(start) if start else None,
            stage=args.stage,
        )
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    import sfumato
    from sfumato.cli.arguments import sampler_options
    from sfumato.train import evaluate

    config = sfumato.SamplerConfig().options(**sampler_options(args))
    with terminal.progress("answering") as progress:
        figures = evaluate.run(
            args.model,
            count=args.count,
            seed=args.seed,
            config=config,
            progress=progress,
            cache_type=args.cache_type,
            quantize=args.quantize,
        )
    terminal.print_report(args.json, figures, [evaluate.table(figures)])
    return 0
