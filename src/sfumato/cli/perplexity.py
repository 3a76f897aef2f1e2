"""`sfumato perplexity`: how well a model's causal mode predicts a text."""

from __future__ import annotations

import argparse
import json
import sys
import time

from sfumato.cli import notes

MOST_BYTES = 64 << 20  # of a text: its tokens take some gigabytes as a list
WINDOW = 2048  # tokens of a window at most, where no option says


def main(args: argparse.Namespace) -> int:
    """Print the figures. Raises ValueError or OSError for bad input."""
    text = _text(args.file)  # before the slow imports and the model
    with notes.loading():
        from sfumato.cli import generation
        from sfumato.diffusion.causal import perplexity
    model = generation.load(args)
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text, special=False)
    context = args.context or min(WINDOW, model.config.context_length)
    stride = args.stride or max(1, context // 2)
    began = time.perf_counter()
    with notes.progress("scoring") as show:
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
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    print(
        f"perplexity      {figures.perplexity:.4g}\n"
        f"nats per token  {figures.nats_per_token:.4f}\n"
        f"bits per byte   {figures.bits_per(size):.4f}\n"
        f"{figures.tokens:,} tokens of {size:,} bytes, in windows of {context:,} that go on by "
        f"{stride:,}; {figures.tokens / max(seconds, 1e-9):,.0f} tokens/s"
    )
    return 0


def _text(name: str) -> str:
    """The text of a file, or of standard input for -. Raises ValueError or OSError."""
    if name == "-":
        where, data = "standard input", sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        where = name
        with open(name, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{where}: has more than {MOST_BYTES:,} bytes; score a part of it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not UTF-8 text: {error}") from None
    if not text:
        raise ValueError(f"{where}: holds no text")
    return text
