"""`sfumato train`, and `sfumato perplexity`: how well the causal mode predicts a text."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sfumato.cli import files, terminal

MOST_BYTES = 64 << 20  # of a text: its tokens take some gigabytes as a list
WINDOW = 2048  # tokens of a window at most, where no option says


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    return _train(args) if args.command == "train" else _perplexity(args)


def _train(args: argparse.Namespace) -> int:
    import torch

    from sfumato.convert.files import check_checkpoint_folder
    from sfumato.train import recipe
    from sfumato.weights.files.atomic_write import check_writable

    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)  # now: a training takes hours
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


def _perplexity(args: argparse.Namespace) -> int:
    text = files.read_text(args.file, MOST_BYTES)  # before the slow imports and the model
    if not text:
        raise ValueError(f"{args.file}: holds no text")
    with terminal.loading():
        from sfumato.cli import generation
        from sfumato.diffusion.causal import perplexity
    model = generation.load(args)
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text, special=False)
    context = args.context or min(WINDOW, model.config.context_length)
    stride = args.stride or max(1, context // 2)
    began = time.perf_counter()
    with terminal.progress("scoring") as show:
        figures = perplexity(model.network, ids, tokenizer.bos_id, context, stride, show)
    seconds = time.perf_counter() - began
    size = len(text.encode())
    report = {
        "file": args.file,
        "bytes": size,
        "tokens": figures.tokens,
        "log_likelihood": figures.log_likelihood,
        "nats_per_token": figures.nats_per_token,
        "perplexity": figures.perplexity,
        "bits_per_byte": figures.bits_per(size),
        "context": context,
        "stride": stride,
        "seconds": seconds,
    }
    lines = (
        f"perplexity      {figures.perplexity:.4g}",
        f"nats per token  {figures.nats_per_token:.4f}",
        f"bits per byte   {figures.bits_per(size):.4f}",
        f"{figures.tokens:,} tokens of {size:,} bytes, in windows of {context:,} that go on by "
        f"{stride:,}; {figures.tokens / max(seconds, 1e-9):,.0f} tokens/s",
    )
    terminal.print_report(args.json, report, lines)
    return 0
