"""`sfumato train` and `sfumato eval`: recipes and measurements of sfumato.train, by name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    return _train(args) if args.action == "train" else _evaluate(args)


def _train(args: argparse.Namespace) -> int:
    import torch

    from sfumato.train import recipe

    if args.threads:
        torch.set_num_threads(args.threads)
    recipe.run(args.recipe, Path(args.out), steps=args.steps, seed=args.seed)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from sfumato.cli import generation
    from sfumato.cli.units import table
    from sfumato.train import evaluate

    scores = evaluate.report(generation.load(args), count=args.count, seed=args.seed)
    if args.json:
        print(json.dumps(scores, indent=2))
        return 0
    rows = [("", "tasks", "exact", "steps, mean", "most", "converged")]
    for name, score in scores.items():
        shares = f"{score['exact']:.1%}", f"{score['converged']:.1%}"
        steps = f"{score['steps']:.2f}", str(score["most_steps"])
        rows.append((name, str(score["tasks"]), shares[0], *steps, shares[1]))
    print("\n".join(table(rows, indent="")))
    return 0
