"""`sfumato convert`: safetensors to GGUF and back, and GGUF to a GGUF of another format."""

from __future__ import annotations

import argparse
from collections import Counter

from sfumato.cli.terminal import print_message, progress, size
from sfumato.convert import Converted, convert


def main(args: argparse.Namespace) -> int:
    """Convert. Raises ValueError or OSError for what cannot be read, converted or written."""
    with progress("converting", in_bytes=True) as show:
        done = convert(args.source, args.out, args.to, force=args.force, progress=show)
    for note in done.notes:
        print_message("note", note)
    print(summary(done))
    return 0


def summary(done: Converted) -> str:
    """One line: what was written, and how many tensors are of which format."""
    counted = Counter(tensor.format for tensor in done.tensors).most_common()
    formats = ", ".join(f"{count} {name}" for name, count in counted)
    return f"{done.path}: {done.target}, {size(done.nbytes)} ({formats})"
